"""Faults around a live switch: it comes about on all ranks, or on none and its client is told."""

import pytest

from paceline.runtime.domain.events import TrialStarted
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Conflict
from paceline.runtime.server import generations
from paceline.runtime.server.fleet import Worker, WorkerError, WorkerLost
from paceline.runtime.server.generations import Generations
from paceline.runtime.server.record import Request
from paceline.runtime.server.trial_runner import TrialRunner
from tests.runtime.faults.support import MODES, STEPS, Inject, settings_of, spec_of
from tests.runtime.support import (
    OnEvent,
    Settings,
    Switching,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
)

LOCAL: Settings = {"sync.mode": "local_sgd", "sync.period": 3}
SWITCHES: list[tuple[Settings, Settings]] = [
    ({}, {"sync.bucket_mb": 1.0}),
    ({}, {"mapping.order": "3,1,0,2"}),
    ({}, LOCAL),
    (LOCAL, {**LOCAL, "sync.period": 2}),
    (LOCAL, {}),
    (LOCAL, {**LOCAL, "mapping.order": "3,1,0,2"}),
]


def switched_spec(embedded: EmbeddedRuntime, before: Settings, **fields: object) -> TrialSpec:
    """Seven steps of plain SGD with a barrier after each."""
    return spec_for(embedded, before, steps=STEPS, workload="regression/sgd", evaluations=STEPS, **fields)


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize(("before", "settings"), SWITCHES)
def test_rank_killed_while_a_live_switch_is_established(
    embedded: EmbeddedRuntime,
    on_event: OnEvent,
    monkeypatch: pytest.MonkeyPatch,
    before: Settings,
    settings: Settings,
    after: int,
) -> None:
    switching, killed = Switching(embedded, on_event), list[Worker]()
    plan = Generations.plan

    def plan_and_kill(self: Generations, workers: tuple[Worker, ...], *, ranks: int) -> object:
        if switching.requests and not killed:
            killed.append(workers[1])
            self.fleet.fence(workers[1])
        return plan(self, workers, ranks=ranks)

    monkeypatch.setattr(Generations, "plan", plan_and_kill)
    spec = switched_spec(embedded, before)
    events = switching.run(spec, {after: settings})
    assert killed
    assert result_of(events).failure is None
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    first, *others = [event for event in events if isinstance(event, TrialStarted)]
    new = [event for event in others if event.strategy != first.strategy]
    (answer,) = switching.answers
    assert answer in [event.generation for event in new]
    # The switch took place at the last state that all ranks agreed on, without a trace of what came after it.
    expected = switching.run(spec, {min(event.step for event in new): settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")


@pytest.mark.parametrize("settings", [{**LOCAL, "sync.period": 2}, {**LOCAL, "mapping.order": "3,1,0,2"}])
def test_rank_killed_between_a_switch_and_the_next_sync_point(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, settings: Settings
) -> None:
    switching, spec = Switching(embedded, on_event), switched_spec(embedded, LOCAL)
    inject(step=5, position=5, phase="forward")
    events = switching.run(spec, {4: settings})
    # Step 4 was done before the switch, and what the dead rank learnt in it was shared with nobody.
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, 4, 3]
    expected = switching.run(spec, {3: settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=STEPS)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("before", "settings"), [({}, {"sync.bucket_mb": 1.0}), (LOCAL, {})])
def test_rank_killed_while_it_prepares_for_a_switch(
    embedded: EmbeddedRuntime,
    on_event: OnEvent,
    inject: Inject,
    before: Settings,
    settings: Settings,
    phase: str,
) -> None:
    switching = Switching(embedded, on_event)
    # Wrapping the model in DDP computes the next step's loss once before the step.
    spec = switched_spec(embedded, before)
    expected = switching.run(spec, {3: settings})
    inject(step=4, position=5, phase=phase)
    events = switching.run(spec, {3: settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=STEPS)


def test_switch_that_no_attempt_can_establish_is_refused(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    switching = Switching(embedded, on_event)
    plan = Generations.plan

    def plan_and_inject(self: Generations, workers: tuple[Worker, ...], *, ranks: int) -> object:
        if switching.requests:
            inject(step=5, position=5, phase="forward")
        return plan(self, workers, ranks=ranks)

    monkeypatch.setattr(Generations, "plan", plan_and_inject)
    result = result_of(switching.run(switched_spec(embedded, {}), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "worker_lost"
    assert "no generation came about in 5 attempts" in result.message
    assert [type(answer) for answer in switching.answers] == [Conflict]
    assert result.strategy == embedded.describe_knobs().default


def test_switch_that_loses_a_worker_is_refused_where_the_trial_is_to_end_then(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject
) -> None:
    switching = Switching(embedded, on_event)
    inject(step=5, position=5, phase="backward")
    result = result_of(switching.run(switched_spec(embedded, {}, on_worker_lost="fail"), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "worker_lost"
    assert [type(answer) for answer in switching.answers] == [Conflict]
    assert result.strategy == embedded.describe_knobs().default


def test_switch_to_which_the_workload_objects_is_refused(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "LOSS_SECONDS", 0.1)
    switching = Switching(embedded, on_event)
    inject(step=5, position=5, phase="forward", action="ValueError")
    result = result_of(switching.run(switched_spec(embedded, {}), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "error"
    assert [type(answer) for answer in switching.answers] == [Conflict]


@pytest.mark.parametrize(("lost", "done"), [("replace", True), ("fail", False)])
@pytest.mark.parametrize("mode", MODES)
def test_switch_asked_for_while_the_trial_recovers_is_done_afterwards_or_refused(
    embedded: EmbeddedRuntime, inject: Inject, monkeypatch: pytest.MonkeyPatch, mode: str, lost: str, done: bool
) -> None:
    strategy = embedded.describe_knobs().strategy({**settings_of(embedded, mode), "compress.codec": "bf16"})
    requests = []
    recover = TrialRunner._recover

    async def ask_and_recover(self: TrialRunner, error: WorkerLost | WorkerError) -> None:
        request = Request(strategy=strategy, done=embedded._loop.create_future())
        requests.append(request)
        self.requests.put_nowait(request)
        self.stop_soon()
        await recover(self, error)

    monkeypatch.setattr(TrialRunner, "_recover", ask_and_recover)
    inject(step=2, position=5, phase="forward")
    events = run(embedded, spec_of(embedded, mode, on_worker_lost=lost))
    (request,) = requests
    if done:
        switched = [event for event in events if isinstance(event, TrialStarted)][-1]
        assert (switched.generation, switched.strategy) == (request.done.result(), strategy)
        assert result_of(events).strategy == strategy
        assert_every_sample_once(events, global_batch=13, steps=STEPS)
    else:
        assert isinstance(request.done.exception(), Conflict)
        assert result_of(events).failure == "worker_lost"
