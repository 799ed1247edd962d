"""What several runtime tests need."""

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest
from torch import Tensor

from paceline.proto.paceline.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.convert import to_message
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import (
    Evaluated,
    SnapshotTaken,
    StepDone,
    TrialEvent,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.trial import Budget, TrialResult, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.server.record import Request
from paceline.runtime.server.trial_runner import TrialRunner

Settings = Mapping[str, KnobValue]
OnEvent = Callable[[Callable[[TrialRunner, TrialEvent], None]], None]

FOREVER = 10**9
"""Steps that no trial of a test reaches."""
DEADLINE_SECONDS = 60.0
"""Nothing that a test waits for takes so long unless it hangs."""


class RunningTrial:
    """A trial whose events a thread reads, so that a test can wait for any of them, but not forever."""

    def __init__(self, runtime: RuntimeAPI, spec: TrialSpec, *, request_id: str = "") -> None:
        self.events: list[TrialEvent] = []
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(runtime, spec, request_id), daemon=True).start()

    def _read(self, runtime: RuntimeAPI, spec: TrialSpec, request_id: str) -> None:
        try:
            for event in runtime.run_trial(spec, request_id=request_id):
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[TrialEvent], bool]) -> TrialEvent:
        """The first event, past or future, that is wanted."""

        def found() -> TrialEvent | None:
            return next((event for event in self.events if wanted(event)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._ended, timeout=DEADLINE_SECONDS)
            event = found()
        assert event is not None, f"the event did not come; the last was {self.events[-1:]}, {self._error}"
        return event

    def wait_for_steps(self, generation: int, count: int = 3) -> None:
        """Until so many steps of a generation are done."""

        def steps() -> int:
            return sum(isinstance(event, StepDone) and event.generation == generation for event in self.events)

        with self._changed:
            self._changed.wait_for(lambda: steps() >= count or self._ended, timeout=DEADLINE_SECONDS)
            assert steps() >= count, f"generation {generation} did not get there; {self._error}"

    @property
    def trial_id(self) -> str:
        """Known once it has started."""
        started = self.wait_for(lambda event: isinstance(event, TrialStarted))
        assert isinstance(started, TrialStarted)
        return started.trial_id

    def wait(self) -> list[TrialEvent]:
        """All events, once the trial has ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, timeout=DEADLINE_SECONDS), "the trial hangs"
        if self._error is not None:
            raise self._error
        return self.events


def run(runtime: RuntimeAPI, spec: TrialSpec) -> list[TrialEvent]:
    """Run a trial to its end; its events."""
    return RunningTrial(runtime, spec).wait()


class Switching:
    """Asks a trial to switch exactly after given steps. The trial must evaluate after each of them."""

    def __init__(self, embedded: EmbeddedRuntime, on_event: OnEvent) -> None:
        self._embedded = embedded
        self._schedule: dict[int, Settings] = {}
        self.requests: list[Request] = []
        on_event(self._ask)

    def _ask(self, runner: TrialRunner, event: TrialEvent) -> None:
        if isinstance(event, Evaluated) and event.step in self._schedule:
            strategy = self._embedded.describe_knobs().strategy(self._schedule.pop(event.step))
            self.requests.append(Request(strategy=strategy, done=self._embedded._loop.create_future()))
            runner.requests.put_nowait(self.requests[-1])

    def run(self, spec: TrialSpec, schedule: Mapping[int, Settings]) -> list[TrialEvent]:
        """Step after which to switch -> settings to switch to."""
        self._schedule, self.requests = dict(schedule), []
        return run(self._embedded, spec)

    @property
    def answers(self) -> list[object]:
        """Generation of each switch, or what its client would be told."""
        assert all(request.done.done() for request in self.requests), "the client would still wait"
        return [request.done.exception() or request.done.result() for request in self.requests]


def spec_for(runtime: RuntimeAPI, settings: Settings, *, steps: int, **fields: object) -> TrialSpec:
    """A spec of the test workload that ends with a snapshot of its last step."""
    values: dict[str, object] = {"workload": "regression", "snapshot_every": steps, **fields}
    strategy = runtime.describe_knobs().strategy(settings)
    return TrialSpec(strategy=strategy, budget=Budget(steps=steps), **values)  # type: ignore[arg-type]


def result_of(events: Sequence[TrialEvent]) -> TrialResult:
    """The result that an event stream ended with."""
    assert isinstance(events[-1], TrialFinished | TrialFailed)
    return events[-1].result


def last_snapshot(events: Sequence[TrialEvent]) -> Snapshot:
    """The last snapshot that was taken."""
    return [event for event in events if isinstance(event, SnapshotTaken)][-1].snapshot


def digests(snapshot: Snapshot, part: str) -> list[str]:
    """Content digest of a part, by rank: equal digests are equal bits."""
    return [p.digest for p in sorted(snapshot.parts, key=lambda p: p.rank) if p.name == part]


def tensors(embedded: EmbeddedRuntime, snapshot: Snapshot, part: str, rank: int = 0) -> dict[str, Tensor]:
    """Read one part of one rank back."""
    return embedded._runtime.store.get_tensors(digests(snapshot, part)[rank])


def standing_steps(events: Sequence[TrialEvent]) -> list[StepDone]:
    """The steps that count: those that no later generation took back."""
    steps: list[StepDone] = []
    for event in events:
        if isinstance(event, TrialStarted):
            steps = [step for step in steps if step.step <= event.step]
        elif isinstance(event, StepDone):
            steps.append(event)
    return steps


def assert_every_sample_once(events: Sequence[TrialEvent], *, global_batch: int, steps: int, first: int = 0) -> None:
    """The ranks' ranges tile the sample stream without gap or overlap, step by step."""
    counted = standing_steps(events)
    assert [step.step for step in counted] == list(range(first + 1, first + steps + 1))
    position = first * global_batch
    for step in counted:
        for start, stop in step.samples:
            assert start == position
            assert stop > start
            position = stop
        assert position == step.step * global_batch


def endless(runtime: RuntimeAPI, **fields: object) -> TrialSpec:
    """A trial that runs until somebody ends it."""
    return spec_for(runtime, {}, steps=FOREVER, snapshot_every=0, **fields)


def request_for(spec: TrialSpec, **fields: object) -> runtime_pb2.RunTrialRequest:
    """The bare request that asks for a trial."""
    values = {"request_id": uuid.uuid4().hex, **fields}
    return runtime_pb2.RunTrialRequest(spec=to_message(spec, types_pb2.TrialSpec), **values)


def events_of(stub: runtime_pb2_grpc.RuntimeStub, request: runtime_pb2.RunTrialRequest) -> list[Any]:
    """The whole stream, within the deadline."""
    return list(stub.RunTrial(request, timeout=DEADLINE_SECONDS))


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """The status that a call is answered with."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error: Any = refused.value
    return error.code(), error.details()
