"""How a command ends: exit statuses, one line for a wrong request, unwinding on signals, cheap `--help`."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner.conftest import CommandLine, started

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
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An address that something listens on, one that nothing does, and a folder with one file."""
    (tmp_path / "bad.json").write_text('{"name": "bad"}')
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        taken, free = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, closed))
        closed.close()
        yield {"TAKEN": taken, "FREE": free, "FOLDER": str(tmp_path)}


RUN = "run digits-cnn --no-tracking"
RECOMMEND = "recommend digits-cnn --policy FREE --cluster"


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
        (f"{RUN} --change 5:a.speed=1", "paceline: cluster local:4 is what it is; only a lab can be changed: "),
        (
            f"{RUN} --change soon:a.speed=1",
            "paceline: timed change 'soon:a.speed=1' must begin with a step or seconds: ",
        ),
        (f"{RUN} --cluster lab:two-racks --change 5:z9.speed=1", "paceline: unknown node, rack or device 'z9'"),
        ("run digitz-cnn", "paceline: unknown workload 'digitz-cnn'; did you mean 'digits-cnn'?"),
        ("run digits-cnn --tracking-uri mysql://db", "paceline: tracking store 'mysql://db' must be a SQLite file"),
        ("run digits-cnn --tracking-uri sqlite:///FOLDER", "paceline: tracking store FOLDER: "),
        ("runtime --listen TAKEN", "paceline: cannot listen on TAKEN: "),
        ("runtime --listen 0.0.0.0:0", "paceline: listening on 0.0.0.0 without TLS "),
        ("train --no-tracking", "paceline: --no-tracking without --out "),
        ("train --timesteps 0", "paceline: training: timesteps=0 must be at least 1"),
        ("train --no-tracking --out FOLDER", "paceline: FOLDER is already there"),
        ("recommend digits-cnn --policy FREE", "paceline: the cluster must be named once: "),
        (f"{RECOMMEND} FOLDER/missing", "paceline: cluster profile FOLDER/missing cannot be read: No such file"),
        (f"{RECOMMEND} FOLDER/bad.json", "paceline: FOLDER/bad.json is no cluster profile: devices "),
        ("serve --policy FOLDER", "paceline: FOLDER is no policy: "),
        ("serve --tracking-uri sqlite:///FOLDER/new.db", "paceline: unknown registered policy 'paceline-policy'; "),
        ("ui --listen 5000", "paceline: address '5000' must be HOST:PORT"),
        ("ui --listen TAKEN --tracking-uri sqlite:///FOLDER/new.db", "paceline: TAKEN must be a free address "),
        ("runtime --workload nowhere:Class", "paceline: workload 'nowhere:Class' cannot be imported "),
    ],
)
def test_wrong_request_gets_one_line_and_status_2(
    command: str, said: str, places: dict[str, str], paceline: CommandLine
) -> None:
    for name, value in places.items():
        command, said = command.replace(name, value), said.replace(name, value)
    status, output, errors = paceline(command)
    assert (status, output) == (2, "")
    assert errors.startswith(said)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_context_managers_once(signum: signal.Signals, status: int) -> None:
    command = [sys.executable, "-c", WAIT, "wait"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
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
