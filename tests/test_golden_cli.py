"""The command line is frozen: commands, their flags, types and defaults.

To change it on purpose, run this and commit the result:
`make test ARGS=tests/test_golden_cli.py PACELINE_UPDATE_GOLDEN=1`
"""

import json
import os
from pathlib import Path
from typing import Any

import typer.main

from paceline.tuner.cli.app import app

GOLDEN = Path(__file__).parent / "golden" / "cli.json"


def parameter(found: Any) -> dict[str, Any]:
    return {
        "kind": found.param_type_name,
        "type": found.type.name,
        "default": found.default,
        "required": found.required,
        "repeated": getattr(found, "multiple", False),
    }


def test_command_line_is_what_was_published() -> None:
    commands: dict[str, Any] = typer.main.get_group(app).commands
    present = {
        name: {
            "/".join([*found.opts, *found.secondary_opts]): parameter(found)
            for found in sorted(commands[name].params, key=lambda found: found.opts)
        }
        for name in sorted(commands)
    }
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(present, indent=2) + "\n")
    assert present == json.loads(GOLDEN.read_text())
