"""`paceline runtime` as a process of its own: how it comes up, what it leaves behind, and what it refuses first."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from paceline.runtime.client import RuntimeClient
from paceline.runtime.domain.events import StepDone
from paceline.runtime.errors import Conflict, InvalidRequest, PacelineError, UnknownName
from paceline.runtime.launch.local import Local
from paceline.runtime.server.service import serve
from tests.runtime.support import (
    DEADLINE_SECONDS,
    RunningTrial,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
)

PACELINE = str(Path(sys.executable).with_name("paceline"))

OPERATORS_MODULE = """
import torch
from paceline.runtime.workloads.base import Workload

class Line(Workload):
    name = "line"
    doc = "A line through fixed points."
    global_batch, train_samples, heldout_samples = 4, 40, 8

    def model(self):
        return torch.nn.Linear(1, 1)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def batch(self, indices, *, heldout=False):
        return indices.float().unsqueeze(1) / 40

    def loss(self, model, batch):
        return (model(batch) - 3 * batch).square().mean()

    def flops_per_sample(self):
        return 6.0
"""


class Server:
    """A started `paceline runtime` and all that it has started."""

    def __init__(self, process: "subprocess.Popen[str]", port_file: Path) -> None:
        self.process = process
        self._port_file = port_file
        assert process.stderr is not None
        self.greeting = process.stderr.readline()
        self.address = f"127.0.0.1:{int(port_file.read_text())}"
        self.children = psutil.Process(process.pid).children(recursive=True)

    def assert_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.children, timeout=DEADLINE_SECONDS)
        assert alive == []


@contextmanager
def launched(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process, with the operator's module in the current directory."""
    (folder / "operators_module.py").write_text(OPERATORS_MODULE)
    command = [PACELINE, "runtime", "--cluster", "local:2", "--listen", "127.0.0.1:0", "--port-file", "port"]
    with subprocess.Popen(
        [*command, "--workload", "operators_module:Line"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_runtime_trains_what_its_operator_registered_until_sigterm(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        server = Server(process, tmp_path / "port")
        assert server.greeting == f"runtime local:2 listens on {server.address}\n"
        # One that forks, and two that it has forked.
        assert len(server.children) == 3
        with RuntimeClient(server.address) as client:
            assert "line" in [profile.name for profile in client.list_workloads()]
            result = result_of(run(client, spec_for(client, {}, steps=60, workload="line")))
        assert result.failure is None
        assert result.heldout_curve[-1].loss < result.heldout_curve[0].loss
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, errors) == (0, "")
        server.assert_nothing_is_left()
        assert not (tmp_path / "port").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_of_a_runtime_that_ends_in_the_middle_of_a_trial(
    tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    with launched(tmp_path) as process:
        server = Server(process, tmp_path / "port")
        with RuntimeClient(server.address) as client:
            trial = RunningTrial(client, spec_for(client, {}, steps=10**9, workload="line", snapshot_every=0))
            trial.wait_for(lambda event: isinstance(event, StepDone))
            # Ctrl-C goes to every process of the terminal's group.
            os.killpg(process.pid, signum)
            assert process.wait(DEADLINE_SECONDS) == status
            server.assert_nothing_is_left()
            with pytest.raises(PacelineError):
                trial.wait()


@pytest.mark.slow
def test_runtime_that_is_stopped_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        server, deadline = psutil.Process(process.pid), time.monotonic() + DEADLINE_SECONDS
        children: list[psutil.Process] = []
        while not children and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            children = server.children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert (process.returncode, errors) == (0, "")
        _, alive = psutil.wait_procs(children, timeout=DEADLINE_SECONDS)
        assert alive == []
        assert not (tmp_path / "port").exists()


@pytest.mark.slow
def test_trial_survives_the_process_that_forks_its_workers(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        server = Server(process, tmp_path / "port")
        (zygote,) = psutil.Process(process.pid).children()
        with RuntimeClient(server.address) as client:
            spec = spec_for(client, {}, steps=50, workload="line")
            expected = digests(last_snapshot(run(client, spec)), "model")
            trial = RunningTrial(client, spec)
            trial.wait_for(lambda event: isinstance(event, StepDone))
            zygote.kill()
            assert digests(last_snapshot(trial.wait()), "model") == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
        server.assert_nothing_is_left()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the names in the cases below stand for."""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"TAKEN": f"127.0.0.1:{server.getsockname()[1]}", "FILE": str(tmp_path / "file")}


FREE = "127.0.0.1:0"


@pytest.mark.parametrize(
    ("cluster", "listen", "options", "kind", "message"),
    [
        (
            "local:2",
            "TAKEN",
            {},
            Conflict,
            "cannot listen on TAKEN: Address already in use; use port 0 for any free one",
        ),
        (
            "local:2",
            "0.0.0.0:0",
            {},
            InvalidRequest,
            "listening on 0.0.0.0 without TLS would let everyone on the network in; use 127.0.0.1, or pass --insecure "
            "if that is meant",
        ),
        ("local:2", "localhost", {}, InvalidRequest, "address 'localhost' must be HOST:PORT; for example "),
        ("locl:2", FREE, {}, UnknownName, "unknown launcher 'locl'; did you mean 'local'?"),
        ("local", FREE, {}, InvalidRequest, "cluster 'local' must be LAUNCHER:WHAT; for example local:4"),
        ("local:0", FREE, {}, InvalidRequest, "cluster local:0 must name 1 to 64 workers; for example local:4"),
        (
            "local:2",
            FREE,
            {"workload_classes": ("nowhere:Class",)},
            InvalidRequest,
            "workload 'nowhere:Class' cannot be imported (No module named 'nowhere'); write it module:Class",
        ),
        (
            "local:2",
            FREE,
            {"workload_classes": ("json:Nothing",)},
            InvalidRequest,
            "workload 'json:Nothing' cannot be imported (module 'json' has no attribute 'Nothing'); write it ",
        ),
        (
            "local:2",
            FREE,
            {"workload_classes": ("json:JSONDecoder",)},
            InvalidRequest,
            "workload 'json:JSONDecoder' is not a subclass of paceline.runtime.workloads.base.Workload",
        ),
        ("local:2", FREE, {"store_url": "FILE"}, InvalidRequest, "cannot keep snapshots at 'FILE': "),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_starts(
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
    listen: str,
    options: dict[str, object],
    kind: type[Exception],
    message: str,
) -> None:
    started = []
    monkeypatch.setattr(Local, "start", lambda *_: started.append(True))
    for name, value in places.items():
        listen, message = listen.replace(name, value), message.replace(name, value)
        options = {key: value if option == name else option for key, option in options.items()}
    with pytest.raises(kind) as refused:
        asyncio.run(serve(cluster, listen=listen, **options))  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
    assert not started


def test_refusal_is_one_line_and_status_2(places: dict[str, str]) -> None:
    command = [PACELINE, "runtime", "--listen", places["TAKEN"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS)
    line = f"paceline: cannot listen on {places['TAKEN']}: Address already in use; use port 0 for any free one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
