"""The MLflow UI as a process: it answers for the store's runs, and takes all its processes with it."""

import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from paceline.runtime.errors import Conflict, InvalidRequest
from paceline.tuner.tracking.store import TrackingStore
from paceline.tuner.tracking.ui import serve_ui
from tests.tuner.tracking.samples import SPEC, make_result, open_session

Spawn = Callable[..., "subprocess.Popen[str]"]

SERVE = """
import signal, sys
from paceline.tuner.tracking.ui import serve_ui
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
serve_ui(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


def wait_until_up(server: "subprocess.Popen[str]", port: int) -> None:
    """Poll until the server is up or its process is gone; the test's own timeout is the deadline."""
    while server.poll() is None:
        try:
            ask(port, "/health")
        except urllib.error.URLError:
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(0.1)
        else:
            return
    pytest.fail(f"the UI ended with status {server.returncode}")


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_it_serves_the_runs_and_leaves_no_process(
    tracking: TrackingStore, spawn: Spawn, signum: signal.Signals, status: int
) -> None:
    with open_session(tracking) as session:
        trial = session.start_trial(SPEC, name="t")
        trial.finish(make_result())
    port = free_port()
    server = spawn(SERVE, tracking.uri, str(port), MLFLOW_RUN_ID="nonsense", MLFLOW_STATIC_PREFIX="/nonsense")
    wait_until_up(server, port)
    processes = psutil.Process(server.pid).children(recursive=True)
    assert processes
    assert b"<title>MLflow</title>" in ask(port, "/")
    found = json.loads(ask(port, "/api/2.0/mlflow/runs/search", {"experiment_ids": [session.experiment_id]}))
    assert {run["info"]["run_id"] for run in found["runs"]} == {session.run_id, trial.run_id}
    artifact = ask(port, f"/get-artifact?path=result.json&run_id={trial.run_id}")
    assert json.loads(artifact)["goodput"] == 1200.0
    server.send_signal(signum)
    server.communicate()
    assert server.returncode == status
    left = psutil.wait_procs(processes, timeout=10)[1]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_refused(uri: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Conflict, match=rf"127\.0\.0\.1:{port} must be a free address .*Address already in use"):
            serve_ui(uri, host="127.0.0.1", port=port)


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_out_of_range_is_refused(uri: str, port: int) -> None:
    with pytest.raises(InvalidRequest, match=f"port {port} must be from 1 to 65535"):
        serve_ui(uri, host="127.0.0.1", port=port)


def test_a_host_that_is_no_address_is_refused(uri: str) -> None:
    with pytest.raises(Conflict, match="no host:80 must be a free address of this machine"):
        serve_ui(uri, host="no host", port=80)
