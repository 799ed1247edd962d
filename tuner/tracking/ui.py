"""MLflow's web UI on a tracking store, in the foreground."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from paceline.runtime.errors import Conflict, InvalidRequest, PacelineError
from paceline.tuner.tracking.store import open_store

_STOP_SECONDS = 10.0


def serve_ui(uri: str, *, host: str, port: int) -> None:
    """Serve the UI and MLflow's REST API until an exception, such as Ctrl-C, ends it and all its processes.

    Raises Conflict when the address cannot be listened on, before anything starts, and PacelineError when the
    server ends by itself.
    """
    tracking = open_store(uri)
    _check_free(host, port)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
            *(
                "--backend-store-uri",
                tracking.uri,
                "--default-artifact-root",
                tracking.artifact_root.as_uri(),
            ),
            *("--host", host, "--port", str(port)),
        ],
        env=_environment(),
        cwd=tracking.path.parent,
        start_new_session=True,
    )
    try:
        status = server.wait()
    finally:
        _stop(server)
    raise PacelineError(f"the MLflow server on {host}:{port} ended by itself with status {status}")


def _check_free(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"port {port} must be from 1 to 65535")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise Conflict(
            f"{host}:{port} must be a free address of this machine ({error.strerror}); try another port, or "
            "host 127.0.0.1"
        ) from error


def _environment() -> dict[str, str]:
    """This process's environment without the MLflow settings that name another store, run or feature."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "_MLFLOW_"))
        or name.startswith("MLFLOW_SERVER_")
        or name == "MLFLOW_DISABLE_TELEMETRY"
    }
    # The job runner is for evaluating language models, and would be two more processes.
    return {**kept, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _stop(server: "subprocess.Popen[bytes]") -> None:
    """End the server politely, then whatever of its session is left."""
    try:
        server.terminate()
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
