"""How a command ends: exit statuses, one line for a wrong request, unwinding on signals, cheap `--help`."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
MAIN = f"{IMPORTS}from paceline.tuner.cli import main; main()"
WAIT = f"""{IMPORTS}
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


def paceline(arguments: Sequence[str], code: str = MAIN) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'"),
        (["run"], "Missing argument 'WORKLOAD'"),
        (["run", "digits-cnn", "--stpes", "9"], "No such option: --stpes Did you mean --steps?"),
        (["run", "digits-cnn", "--steps", "many"], "'many' is not a valid int"),
        (["run", "digits-cnn", "--steps", "0"], "budget: steps=0 must be at least 1"),
        (["run", "digits-cnn", "--runtime", "here"], "address 'here' must be HOST:PORT"),
        (
            ["run", "digits-cnn", "--runtime", "127.0.0.1:1", "--cluster", "local:2"],
            "--cluster local:2 has no effect with --runtime 127.0.0.1:1; leave one of them out",
        ),
        (
            ["run", "digits-cnn", "--set", "sync.mod=allreduce"],
            "unknown knob 'sync.mod'; did you mean 'sync.mode'?",
        ),
        (["run", "digits-cnn", "--set", "sync.period=0"], "sync.period=0: "),
        (["run", "digitz-cnn"], "unknown workload 'digitz-cnn'; did you mean 'digits-cnn'?"),
        (["run", "digits-cnn", "--cluster", "locl:4"], "unknown launcher 'locl'; did you mean 'local'?"),
    ],
)
def test_wrong_request_gets_one_line_and_status_2(arguments: list[str], said: str) -> None:
    done = paceline([*arguments, *(["--no-tracking"] if "run" in arguments else [])])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.startswith("paceline")
    assert done.stderr.count("\n") == 1


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
    heavy = "{'torch', 'mlflow', 'gymnasium', 'stable_baselines3', 'grpc'}"
    code = f"import atexit\n{MAIN.replace('main()', '')}\natexit.register(lambda: print('heavy:', {heavy} & set(sys.modules)))\nmain()"
    done = paceline(arguments, code)
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    assert done.stdout.endswith("heavy: set()\n")
