"""`paceline tune` as a user starts it."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from paceline.tuner.tracking.store import open_store
from tests.tuner.conftest import CommandLine, started

PACELINE = str(Path(sys.executable).with_name("paceline"))
TUNE = [PACELINE, "tune", "digits-cnn", "--cluster", "local:2"]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'paceline.db'}"


@pytest.mark.slow
def test_json_is_one_object_and_the_session_is_tracked(uri: str) -> None:
    budgets = ["--steps", "8", "--trials", "1", "--confirm", "2"]
    done = subprocess.run(
        [*TUNE, *budgets, "--json", "--tracking-uri", uri], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["workload"] == "digits-cnn"
    assert found["reference"]["steps"] == 8
    assert len(found["trials"]) == 1
    assert found["strategy"] == found["recommended"]
    assert found["gain_interval"][0] >= 1
    assert "is not registered: the planner chooses" in done.stderr
    assert "trial 1 of 1: " in done.stderr
    client = open_store(uri).client
    session = client.get_run(found["mlflow_run_id"])
    assert (session.info.status, session.data.params["policy"]) == ("FINISHED", "planner")
    child = client.get_run(found["trials"][0]["mlflow_run_id"])
    assert child.data.tags[MLFLOW_PARENT_RUN_ID] == found["mlflow_run_id"]


@pytest.mark.slow
def test_signal_stops_workers_and_closes_runs(uri: str) -> None:
    terminal, stderr = pty.openpty()
    command = [*TUNE, "--seconds", "600", "--policy", "random", "--tracking-uri", uri]
    with started(command, stdout=subprocess.PIPE, stderr=stderr) as process, os.fdopen(terminal, "rb") as shown:
        os.close(stderr)
        text = b""
        while b"step 2" not in text:
            text += os.read(shown.fileno(), 4096)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert (process.returncode, output) == (143, "")
    assert len(workers) >= 2
    assert not [each for each in workers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    client = open_store(uri).client
    experiment = client.get_experiment_by_name("digits-cnn")
    assert experiment is not None
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["KILLED", "KILLED"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--trials 0", "paceline: tuning: trials=0 must be at least 1"),
        ("--confirm 1", "paceline: tuning: confirm=1 must be at least 2"),
        ("--steps 0", "paceline: budget: steps=0 must be at least 1"),
        ("--policy plannr", "paceline: unknown policy 'plannr'; did you mean 'planner'?"),
        ("--policy ./nowhere", "paceline: nowhere is no policy: No such file or directory"),
        ("--policy 127.0.0.1:1", "paceline: no Paceline server answers at 127.0.0.1:1: "),
        ("--policy models:/paceline-policy@champion", "paceline: unknown registered policy 'paceline-policy'; "),
    ],
)
def test_wrong_request_gets_one_line_and_status_2(options: str, said: str, uri: str, paceline: CommandLine) -> None:
    status, output, errors = paceline(f"tune digits-cnn --tracking-uri {uri} {options}")
    assert (status, output) == (2, "")
    assert errors.startswith(said)
    assert errors.count("\n") == 1
