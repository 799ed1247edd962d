"""Trials that come to lower precision in stages: when, on which ranks, and what they fall back to."""

import logging
from collections.abc import Callable, Sequence

import pytest

from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import SnapshotTaken, TrialEvent, TrialStarted
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.server.phases import stages
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
    standing_steps,
    tensors,
)

LOW: dict[str, KnobValue] = {
    "precision.compute": "bf16",
    "compress.codec": "topk",
    "precision.phases": "steps",
    "precision.phase_steps": 5,
}


def started(embedded: EmbeddedRuntime, events: Sequence[TrialEvent], settings: Settings) -> list[tuple[int, int]]:
    """Step and stage, 1 the first, of each generation; all steps that count were done in the right one."""
    order = stages(embedded.describe_knobs().strategy(settings))
    found = [event for event in events if isinstance(event, TrialStarted)]
    for step in standing_steps(events):
        in_force = [event for event in found if event.step < step.step][-1]
        assert step.generation == in_force.generation
    return [(event.step, 1 + order.index(event.strategy)) for event in found]


@pytest.mark.parametrize(
    "settings",
    [LOW, {**LOW, "sync.mode": "local_sgd", "sync.period": 3}, {**LOW, "sync.mode": "async", "sync.staleness": 2}],
    ids=lambda settings: str(settings.get("sync.mode", "allreduce")),
)
def test_by_steps_generations_begin_exactly_where_stages_end(embedded: EmbeddedRuntime, settings: Settings) -> None:
    events = run(embedded, spec_for(embedded, settings, steps=14, workload="regression/momentum"))
    assert started(embedded, events, settings) == [(0, 1), (5, 2), (10, 3)]
    assert result_of(events).failure is None
    assert result_of(events).strategy == embedded.describe_knobs().strategy(settings)
    assert_every_sample_once(events, global_batch=13, steps=14)
    assert len(set(digests(last_snapshot(events), "model"))) == 1


@pytest.mark.parametrize("mode", ["allreduce", "local_sgd"])
@pytest.mark.parametrize("phase", ["nan", "spike"])
def test_what_goes_wrong_on_one_rank_takes_all_back_one_stage_at_one_step(
    embedded: EmbeddedRuntime,
    inject: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    mode: str,
    phase: str,
) -> None:
    inject(step=7, position=9, phase=phase)
    settings: Settings = {**LOW, "sync.mode": mode}
    spec = spec_for(embedded, settings, steps=25, workload="regression/sgd")
    with caplog.at_level(logging.WARNING, "paceline.runtime.server.phases"):
        events = run(embedded, spec)
    assert result_of(events).failure is None, result_of(events).message
    # The barrier is asked for once the step is known of, and the stage before lasts twice as long from there.
    found = started(embedded, events, settings)
    (back,) = [step for step, stage in found[1:] if stage == 1]
    assert 7 <= back <= 10
    expected = [(0, 1), (5, 2), (back, 1), (back + 10, 2), (back + 15, 3)]
    assert found == [(step, stage) for step, stage in expected if step < 25]
    (record,) = caplog.records
    assert record.message.startswith("from stage 2 to 1 of 3: the training loss ")
    assert "at step 7" in record.message
    assert [step.step for step in standing_steps(events) if step.skipped] == ([7] if phase == "nan" else [])
    assert_every_sample_once(events, global_batch=13, steps=25)
    snapshot = last_snapshot(events)
    assert len(set(digests(snapshot, "model"))) == 1
    assert all(weight.isfinite().all() for weight in tensors(embedded, snapshot, "model").values())


def test_what_is_not_finite_in_the_first_stage_ends_the_trial(
    embedded: EmbeddedRuntime, inject: Callable[..., None]
) -> None:
    inject(step=3, phase="nan")
    result = result_of(run(embedded, spec_for(embedded, LOW, steps=12)))
    assert (result.failure, result.message) == ("diverged", "the training loss is nan at step 3")


def test_stable_stages_end_when_the_loss_is_stable(embedded: EmbeddedRuntime) -> None:
    settings: Settings = {**LOW, "precision.phases": "stable", "precision.phase_steps": 20}
    events = run(embedded, spec_for(embedded, settings, steps=400, workload="regression/sgd"))
    (_, *rest) = started(embedded, events, settings)
    assert [stage for _, stage in rest] == [2, 3]
    assert rest[0][0] >= 20
    assert rest[1][0] - rest[0][0] >= 20
    assert_every_sample_once(events, global_batch=13, steps=400)


@pytest.mark.parametrize("at", [4, 7, 10])
def test_a_restored_trial_goes_on_in_its_stage_bit_for_bit(embedded: EmbeddedRuntime, at: int) -> None:
    fields = {"workload": "regression/dropout", "steps": 14}
    whole = run(embedded, spec_for(embedded, LOW, **fields))
    half = run(embedded, spec_for(embedded, LOW, **fields, snapshot_every=at))
    middle = next(event.snapshot for event in half if isinstance(event, SnapshotTaken))
    rest = spec_for(embedded, LOW, workload="regression/dropout", steps=14 - at, start_snapshot=middle.snapshot_id)
    second = run(embedded, rest)
    expected = [(0, 1), (5, 2), (10, 3)]
    begun = [entry for entry in expected if entry[0] <= at]
    assert started(embedded, second, LOW) == [(at, begun[-1][1]), *expected[len(begun) :]]
    for part in ("model", "optimizer", "sync", "residuals", "codec", "rng", "numbers"):
        assert digests(last_snapshot(second), part) == digests(last_snapshot(whole), part), part


def test_a_live_switch_begins_the_stages_of_its_own_strategy(embedded: EmbeddedRuntime, on_event: OnEvent) -> None:
    switched: Settings = {**LOW, "precision.compute": "fp16"}
    spec = spec_for(embedded, LOW, steps=20, evaluations=5)
    events = Switching(embedded, on_event).run(spec, {8: switched})
    found = [event for event in events if isinstance(event, TrialStarted)]
    assert [event.step for event in found] == [0, 5, 8, 13, 18]
    order = stages(embedded.describe_knobs().strategy(switched))
    assert tuple(event.strategy for event in found[2:]) == order
    assert result_of(events).strategy == order[-1]
    assert_every_sample_once(events, global_batch=13, steps=20)


def test_a_worker_lost_in_a_stage_is_replaced_in_it(embedded: EmbeddedRuntime, inject: Callable[..., None]) -> None:
    inject(step=7, phase="backward")
    events = run(embedded, spec_for(embedded, LOW, steps=14))
    assert started(embedded, events, LOW) == [(0, 1), (5, 2), (6, 2), (10, 3)]
    assert_every_sample_once(events, global_batch=13, steps=14)
