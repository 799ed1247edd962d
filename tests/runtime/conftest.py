"""Real runtimes for the tests, shared where a test cannot hurt the next one."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch.distributed as dist

from paceline.proto.paceline.v1 import runtime_pb2_grpc
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.client import RuntimeClient
from paceline.runtime.domain.events import TrialEvent
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.samples import SampleStream
from paceline.runtime.server.core import EventLog
from paceline.runtime.server.service import start_service
from paceline.runtime.server.trial_runner import TrialRunner
from tests.runtime.trainable import FAULT_VARIABLE, Regression

WORKLOADS = ("tests.runtime.trainable:Regression", "tests.runtime.trainable:Pair")
MAX_STREAMS = 4


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where workers look for a fault; set before any of them starts."""
    path = tmp_path_factory.mktemp("faults") / "fault.json"
    os.environ[FAULT_VARIABLE] = str(path)
    yield path
    del os.environ[FAULT_VARIABLE]


@pytest.fixture(scope="session")
def embedded(fault_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRuntime]:
    """Four warm workers in this process's runtime."""
    store = tmp_path_factory.mktemp("snapshots")
    with EmbeddedRuntime("local:4", store_url=str(store), workload_classes=WORKLOADS) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def address(embedded: EmbeddedRuntime) -> Iterator[str]:
    """The same runtime behind a real gRPC server that allows few streams."""
    start = start_service(embedded._runtime, "127.0.0.1", 0, max_streams=MAX_STREAMS)
    server, port = asyncio.run_coroutine_threadsafe(start, embedded._loop).result()
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), embedded._loop).result()


@pytest.fixture(params=["embedded", "grpc"])
def runtime(request: pytest.FixtureRequest, embedded: EmbeddedRuntime, address: str) -> Iterator[RuntimeAPI]:
    """The runtime by both of its faces."""
    if request.param == "embedded":
        yield embedded
    else:
        with RuntimeClient(address) as client:
            yield client


@pytest.fixture
def inject(fault_file: Path) -> Iterator[Callable[..., None]]:
    """Arrange a fault on the rank that trains on the sample at a position of a step's global batch.

    Within the first epoch, 7 steps, as the same sample comes again in every other.
    """

    def arrange(*, step: int, position: int = 0, phase: str, action: str = "SIGKILL", seed: int = 0) -> None:
        stream = SampleStream(Regression.train_samples, seed)
        cursor = (step - 1) * Regression.global_batch + position
        sample = int(stream.indices(cursor, cursor + 1))
        fault_file.write_text(json.dumps({"sample": sample, "phase": phase, "action": action}))

    yield arrange
    fault_file.unlink(missing_ok=True)


@pytest.fixture
def on_event(
    embedded: EmbeddedRuntime, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[TrialRunner, TrialEvent], None]], None]:
    """Run a function inside the server at every event, before the trial goes on: a moment no client could hit."""

    def arrange(act: Callable[[TrialRunner, TrialEvent], None]) -> None:
        append = EventLog.append

        def noticed(log: EventLog, event: TrialEvent) -> None:
            append(log, event)
            (runner,) = [entry.runner for entry in embedded._runtime._entries.values() if entry.log is log]
            assert runner is not None
            act(runner, event)

        monkeypatch.setattr(EventLog, "append", noticed)

    return arrange


@pytest.fixture
def channel(address: str) -> Iterator[grpc.Channel]:
    """A bare connection to the runtime."""
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> runtime_pb2_grpc.RuntimeStub:
    """Calls as a client in any language makes them."""
    return runtime_pb2_grpc.RuntimeStub(channel)
