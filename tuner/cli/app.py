"""The application and its error boundary: every way a command can end, as one line and an exit status."""

import signal
import sys
from types import FrameType

import typer

from paceline.runtime.errors import PacelineError
from paceline.tuner.cli.demo import demo
from paceline.tuner.cli.lab import lab
from paceline.tuner.cli.probe import probe
from paceline.tuner.cli.recommend import recommend
from paceline.tuner.cli.run import run
from paceline.tuner.cli.runtime import runtime
from paceline.tuner.cli.serve import serve
from paceline.tuner.cli.train import train
from paceline.tuner.cli.tune import tune
from paceline.tuner.cli.ui import ui

app = typer.Typer(
    name="paceline",
    help="Learn how the workers of a training job should synchronise, compress and be placed.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, run, train, tune, recommend, probe, runtime, serve, ui):
    app.command()(command)
app.add_typer(lab)

WRONG_REQUEST = 2


def main() -> None:
    """Run the command line and exit: 0 done, 1 the trial failed, 2 a wrong request, 130 Ctrl-C, 143 SIGTERM."""
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(_status())


def _stop(signum: int, frame: FrameType | None) -> None:
    """Leave every context manager on the way out, so that workers stop and runs close."""
    # A second signal must not cut the cleaning up short and leave processes behind.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
    # Both are what event loops let through; any other exception would end in the task that was running.
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def _status() -> int:
    try:
        # typer turns KeyboardInterrupt into the status 130.
        return int(app(sys.argv[1:] or ["--help"], prog_name="paceline", standalone_mode=False) or 0)
    except PacelineError as error:
        return _refuse("paceline", str(error))
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "paceline"
        return _refuse(command, f"{error.format_message().rstrip('.')}; see {command} --help")


def _refuse(command: str, message: str) -> int:
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return WRONG_REQUEST
