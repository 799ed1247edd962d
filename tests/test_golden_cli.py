"""The command line is frozen: commands, their flags, types and defaults.

To change it on purpose, run this and commit the result:
`make test ARGS=tests/test_golden_cli.py PACELINE_UPDATE_GOLDEN=1`
"""

import inspect
import json
import os
import typing
from pathlib import Path
from typing import Any

import typer.main

from paceline.tuner.cli.app import app

GOLDEN = Path(__file__).parent / "golden" / "cli.json"


def parameters(command: Any) -> dict[str, dict[str, Any]]:
    """Type and default of each option, by its flags, and of each argument, by its name."""
    types = typing.get_type_hints(command.callback)
    found = {
        "/".join([*each.opts, *each.secondary_opts]): {
            "type": inspect.formatannotation(types[each.name]),
            "default": each.default,
            "required": each.required,
        }
        for each in command.params
    }
    return dict(sorted(found.items()))


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """All commands, by their names as users type them."""
    found = {}
    for name, command in group.commands.items():
        found |= commands_of(command, f"{name} ") if hasattr(command, "commands") else {prefix + name: command}
    return found


def test_command_line_is_what_was_published() -> None:
    commands = commands_of(typer.main.get_group(app))
    present = {name: parameters(commands[name]) for name in sorted(commands)}
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(present, indent=2) + "\n")
    assert present == json.loads(GOLDEN.read_text())
