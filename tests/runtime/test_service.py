"""Trials as clients see them: described, listed, attached to, queued and cancelled."""

import threading
import uuid
from collections.abc import Callable

import pytest

from paceline.proto.paceline.v1 import runtime_pb2_grpc
from paceline.runtime import workloads
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.client import RuntimeClient
from paceline.runtime.convert import event_from_message
from paceline.runtime.domain.events import StepDone, TrialFailed, TrialStarted
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Conflict, NotFound
from tests.runtime.support import (
    DEADLINE_SECONDS,
    OnEvent,
    RunningTrial,
    endless,
    request_for,
    result_of,
    run,
    spec_for,
)


def test_descriptions_are_the_same_by_both_faces(embedded: EmbeddedRuntime, address: str) -> None:
    with RuntimeClient(address) as client:
        assert client.describe_knobs() == embedded.describe_knobs()
        assert client.describe_cluster() == embedded.describe_cluster()
        assert client.list_workloads() == embedded.list_workloads()
        assert {profile.name for profile in client.list_workloads()} == set(workloads.references())


def test_trial_is_listed_and_described_from_its_acceptance_to_its_result(runtime: RuntimeAPI) -> None:
    known = runtime.list_trials()
    spec = endless(runtime)
    trial = RunningTrial(runtime, spec, request_id=uuid.uuid4().hex)
    trial.wait_for(lambda event: isinstance(event, StepDone))
    (*before, running) = runtime.list_trials()
    assert [each.trial_id for each in before] == [each.trial_id for each in known]
    assert (running.trial_id, running.state, running.spec, running.result) == (trial.trial_id, "running", spec, None)
    assert running.generation == next(e.generation for e in trial.events if isinstance(e, TrialStarted))
    runtime.cancel_trial(trial.trial_id)
    result = result_of(trial.wait())
    described = runtime.get_trial(trial.trial_id)
    assert (described.state, described.result) == ("failed", result)
    assert described.step >= result.steps


def test_unknown_trial_is_not_found(runtime: RuntimeAPI) -> None:
    for call in (runtime.get_trial, runtime.cancel_trial, runtime.snapshot):
        with pytest.raises(NotFound, match=r"^no trial 'nothing' on this runtime; list_trials names \d+$"):
            call("nothing")


def test_same_request_attaches_to_the_first_trial(embedded: EmbeddedRuntime, address: str) -> None:
    with RuntimeClient(address) as client:
        request_id = uuid.uuid4().hex
        spec = spec_for(embedded, {}, steps=30)
        first = RunningTrial(embedded, spec, request_id=request_id)
        second = RunningTrial(client, spec, request_id=request_id)
        assert second.wait() == first.wait()
        assert list(client.run_trial(spec, request_id=request_id)) == first.events
        assert [trial.request_id for trial in client.list_trials()].count(request_id) == 1


def test_trial_goes_on_while_anybody_listens(embedded: EmbeddedRuntime, address: str) -> None:
    request_id = uuid.uuid4().hex
    spec = endless(embedded)
    staying = RunningTrial(embedded, spec, request_id=request_id)
    staying.wait_for(lambda event: isinstance(event, StepDone))
    with RuntimeClient(address) as client:
        leaving = client.run_trial(spec, request_id=request_id)
        next(leaving)
        leaving.close()
        with RuntimeClient(address) as other:
            again = other.run_trial(spec, request_id=request_id)
            next(again)
            generation = embedded.update_strategy(staying.trial_id, embedded.describe_knobs().default)
            staying.wait_for_steps(generation)
            again.close()
    embedded.cancel_trial(staying.trial_id)
    assert result_of(staying.wait()).failure == "cancelled"


def test_last_listener_that_leaves_cancels(runtime: RuntimeAPI) -> None:
    events = runtime.run_trial(endless(runtime), request_id=uuid.uuid4().hex)
    started = next(events)
    assert isinstance(started, TrialStarted)
    events.close()
    # The queue is served in order, so this one starts when that one has ended.
    run(runtime, spec_for(runtime, {}, steps=1))
    result = runtime.get_trial(started.trial_id).result
    assert result is not None
    assert (result.failure, result.message) == ("cancelled", "cancelled by a client")


def test_cancelling_ends_a_trial_at_a_step_and_may_be_repeated(runtime: RuntimeAPI) -> None:
    trial = RunningTrial(runtime, endless(runtime))
    trial.wait_for(lambda event: isinstance(event, StepDone))
    for _ in range(3):
        runtime.cancel_trial(trial.trial_id)
    events = trial.wait()
    runtime.cancel_trial(trial.trial_id)
    result = result_of(events)
    assert isinstance(events[-1], TrialFailed)
    assert result.failure == "cancelled"
    assert result.steps == sum(isinstance(event, StepDone) for event in events)
    assert runtime.get_trial(trial.trial_id).result == result


def listed(runtime: RuntimeAPI, request_id: str) -> str:
    """The id of a trial that was accepted, as its queued stream has no event that would tell."""
    return next(trial.trial_id for trial in runtime.list_trials() if trial.request_id == request_id)


@pytest.fixture
def accepted(embedded: EmbeddedRuntime, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Waits until the trial of a request has been accepted."""
    submit, done = embedded._runtime.submit, threading.Condition()
    seen: set[str] = set()

    async def noticed(spec: TrialSpec, request_id: str) -> object:
        entry = await submit(spec, request_id)
        with done:
            seen.add(request_id)
            done.notify_all()
        return entry

    monkeypatch.setattr(embedded._runtime, "submit", noticed)

    def wait(request_id: str) -> None:
        with done:
            assert done.wait_for(lambda: request_id in seen, timeout=DEADLINE_SECONDS)

    return wait


def test_trials_run_one_at_a_time_in_the_order_of_their_acceptance(
    runtime: RuntimeAPI, accepted: Callable[[str], None], on_event: OnEvent
) -> None:
    order: list[tuple[str, str]] = []
    on_event(lambda runner, event: order.append((runner.trial_id, type(event).__name__)))
    requests = [uuid.uuid4().hex for _ in range(4)]
    trials = [RunningTrial(runtime, endless(runtime), request_id=requests[0])]
    first = trials[0].trial_id
    for request_id in requests[1:]:
        trials.append(RunningTrial(runtime, spec_for(runtime, {}, steps=3), request_id=request_id))
        accepted(request_id)
    ids = [listed(runtime, request_id) for request_id in requests]
    assert [runtime.get_trial(each).state for each in ids] == ["running", "queued", "queued", "queued"]
    runtime.cancel_trial(first)
    for trial in trials:
        trial.wait()
    assert [trial_id for trial_id, _ in order if trial_id in ids] == [
        trial_id for trial_id in ids for _ in range(len([each for each, _ in order if each == trial_id]))
    ]
    assert [runtime.get_trial(each).state for each in ids] == ["failed", "finished", "finished", "finished"]


@pytest.mark.parametrize("how", ["call", "leaving"])
def test_queued_trial_that_is_cancelled_never_starts(
    runtime: RuntimeAPI, stub: runtime_pb2_grpc.RuntimeStub, accepted: Callable[[str], None], how: str
) -> None:
    running = RunningTrial(runtime, endless(runtime))
    running.wait_for(lambda event: isinstance(event, StepDone))
    request_id = uuid.uuid4().hex
    stream = stub.RunTrial(request_for(endless(runtime), request_id=request_id))
    accepted(request_id)
    queued = listed(runtime, request_id)
    with pytest.raises(Conflict, match=f"^trial {queued} is queued, not running$"):
        runtime.snapshot(queued)
    if how == "call":
        runtime.cancel_trial(queued)
    else:
        stream.cancel()
    after = RunningTrial(runtime, spec_for(runtime, {}, steps=1))
    runtime.cancel_trial(running.trial_id)
    running.wait()
    assert result_of(after.wait()).failure is None
    result = runtime.get_trial(queued).result
    assert result is not None
    assert (result.failure, result.steps, result.generations) == ("cancelled", 0, 0)
    if how == "call":
        assert [type(event_from_message(message)) for message in stream] == [TrialFailed]
