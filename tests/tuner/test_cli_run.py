"""`paceline run` and `paceline runtime` as a user starts them: real workers, real signals."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.runtime.client import RuntimeClient
from paceline.tuner.tracking.store import open_store
from tests.tuner.conftest import started

PACELINE = str(Path(sys.executable).with_name("paceline"))
RUN = [PACELINE, "run", "digits-cnn", "--json", "--cluster", "local:2"]


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'paceline.db'}"


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_json_is_one_object_and_the_run_is_tracked(uri: str) -> None:
    command = [*RUN, "--steps", "6", "--set", "compress.codec=bf16", "--tracking-uri", uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["workload"], found["cluster"], found["steps"]) == ("digits-cnn", "local:2", 6)
    assert found["strategy"]["compress.codec"] == "bf16"
    assert found["failure"] is None
    assert "step 6" in done.stderr
    run = open_store(uri).client.get_run(found["mlflow_run_id"])
    assert (run.info.status, run.data.metrics["steps"]) == ("FINISHED", 6)
    assert run.data.params["compress.codec"] == "bf16"


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_workers_and_closes_runs(signum: signal.Signals, status: int, uri: str) -> None:
    terminal, stderr = pty.openpty()
    command = [*RUN, "--seconds", "600", "--tracking-uri", uri]
    with (
        started(command, stdout=subprocess.PIPE, stderr=stderr) as process,
        os.fdopen(terminal, "rb") as shown,
    ):
        os.close(stderr)
        text = b""
        while b"step 2" not in text:
            text += os.read(shown.fileno(), 4096)
        workers = descendants(process.pid)
        process.send_signal(signum)
        output, _ = process.communicate()
    assert (process.returncode, output) == (status, "")
    assert len(workers) >= 2
    assert are_gone(workers)
    client = open_store(uri).client
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments)
    assert [run.info.status for run in runs] == ["KILLED", "KILLED"]


@pytest.mark.slow
def test_run_on_a_runtime_that_is_up(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    serve = [PACELINE, "runtime", "--cluster", "local:2", "--listen", "127.0.0.1:0", "--port-file", str(port_file)]
    with started(serve, stderr=subprocess.PIPE) as runtime:
        assert runtime.stderr is not None
        address = runtime.stderr.readline().split()[-1]
        assert address == f"127.0.0.1:{port_file.read_text().strip()}"
        run = [PACELINE, "run", "digits-cnn", "--runtime", address, "--steps", "4", "--no-tracking", "--json"]
        found = [json.loads(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(2)]
        assert [each["steps"] for each in found] == [4, 4]
        assert found[0]["heldout_loss"] == found[1]["heldout_loss"]
        with RuntimeClient(address) as client:
            assert len(client.list_trials()) == 2
        workers = descendants(runtime.pid)
        runtime.terminate()
        assert runtime.wait() == 0
    assert len(workers) >= 2
    assert are_gone(workers)
    assert not port_file.exists()
