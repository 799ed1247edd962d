"""How a command ends: exit statuses, one line for a wrong request, unwinding on signals, cheap `--help`."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.tuner.cli import main

WAIT = """
import signal
from contextlib import contextmanager
from paceline.tuner.cli.app import app, main

@contextmanager
def workers():
    try:
        yield
    finally:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        print("stopped", flush=True)

@app.command()
def wait():
    with workers():
        print("ready", flush=True)
        signal.pause()

main()
"""
HELP = """
import atexit, sys
from paceline.tuner.cli import main

HEAVY = {"torch", "mlflow", "gymnasium", "stable_baselines3", "grpc"}
atexit.register(lambda: print("heavy:", sorted(HEAVY & set(sys.modules))))
main()
"""


@pytest.fixture
def _signal_handlers() -> Iterator[None]:
    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An address that something listens on, one that nothing does, and a folder."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        taken, free = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, closed))
        closed.close()
        yield {"TAKEN": taken, "FREE": free, "FOLDER": str(tmp_path)}


RUN = "run digits-cnn --no-tracking"


@pytest.mark.usefixtures("_signal_handlers")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rnu", "paceline: No such command 'rnu'. Did you mean 'run'"),
        ("run", "paceline run: Missing argument 'WORKLOAD'"),
        (f"{RUN} --stpes 9", "paceline run: No such option: --stpes (Possible options: --"),
        (f"{RUN} --steps many", "paceline run: Invalid value for '--steps': "),
        (f"{RUN} --steps 0", "paceline: budget: steps=0 must be at least 1"),
        (f"{RUN} --seed -1", "paceline: seed=-1 must not be negative"),
        (f"{RUN} --runtime here", "paceline: address 'here' must be HOST:PORT"),
        (f"{RUN} --runtime FREE", "paceline: no Paceline server answers at FREE"),
        (f"{RUN} --runtime FREE --cluster local:2", "paceline: --cluster local:2 has no effect with --runtime FREE; "),
        (f"{RUN} --cluster locl:4", "paceline: unknown launcher 'locl'; did you mean 'local'?"),
        (f"{RUN} --world-size 5", "paceline: world size 5 is larger than the cluster; use at most 4"),
        (f"{RUN} --set sync.mod=allreduce", "paceline: unknown knob 'sync.mod'; did you mean 'sync.mode'?"),
        (f"{RUN} --set sync.period=0", "paceline: sync.period=0: "),
        (f"{RUN} --set sync.period=4", "paceline: sync.period=4 has no effect with sync.mode=allreduce; "),
        (f"{RUN} --set mapping.order=0,1", "paceline: mapping.order=0,1: "),
        ("run digitz-cnn", "paceline: unknown workload 'digitz-cnn'; did you mean 'digits-cnn'?"),
        ("run digits-cnn --tracking-uri mysql://db", "paceline: tracking store 'mysql://db' must be a SQLite file"),
        ("run digits-cnn --tracking-uri sqlite:///FOLDER", "paceline: tracking store FOLDER: "),
        ("runtime --listen TAKEN", "paceline: cannot listen on TAKEN: "),
        ("runtime --listen 0.0.0.0:0", "paceline: listening on 0.0.0.0 without TLS "),
        ("runtime --workload nowhere:Class", "paceline: workload 'nowhere:Class' cannot be imported "),
    ],
)
def test_wrong_request_gets_one_line_and_status_2(
    command: str,
    said: str,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in places.items():
        command, said = command.replace(name, value), said.replace(name, value)
    monkeypatch.setattr(sys, "argv", ["paceline", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capfd.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert errors.startswith(said)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_context_managers_once(signum: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", WAIT, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        output, errors = process.communicate()
    assert (process.returncode, output, errors) == (status, "stopped\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-c", HELP, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: paceline" in done.stdout
    assert done.stdout.endswith("heavy: []\n")
