"""Trials in fp16 some of whose gradients overflow: which steps are skipped, by whom, and what they leave behind."""

import itertools

import pytest
import torch

from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import SnapshotTaken
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.precision.loss_scale import INITIAL_SCALE
from paceline.runtime.samples import SampleStream
from paceline.runtime.sync import SYNC_MODES
from tests.runtime.support import (
    Settings,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
    standing_steps,
    tensors,
)
from tests.runtime.trainable import Regression

STEPS = 20
STATE = ("model", "optimizer", "sync", "residuals", "codec")
MODES = SYNC_MODES.names()
AVERAGING = [mode for mode in MODES if SYNC_MODES.get(mode).exchanges_gradients]
"""Modes in which one rank's overflow is every rank's."""


def steep_steps(steps: int) -> list[int]:
    """The steps that one rank trains on the sample whose gradient is too large in."""
    batch = Regression.global_batch
    order = SampleStream(Regression.train_samples, 0).indices(0, steps * batch)
    return [1 + int(place) // batch for place in (order == Regression.steep_sample).nonzero()]


def settings_of(mode: str, **more: KnobValue) -> Settings:
    """In fp16, and so that the same run has the same bits every time."""
    fixed: dict[str, Settings] = {"async": {"sync.staleness": 0}, "local_sgd": {"sync.period": 4}}
    return {"precision.compute": "fp16", "sync.mode": mode, **fixed.get(mode, {}), **more}


def numbers_of(embedded: EmbeddedRuntime, snapshot: Snapshot) -> list[dict[str, float]]:
    """Loss scale by rank."""
    store = embedded._runtime.store
    return [store.get_json(digest)["loss_scale"] for digest in digests(snapshot, "numbers")]


@pytest.mark.parametrize("mode", MODES)
def test_exactly_the_steps_that_overflow_are_skipped(embedded: EmbeddedRuntime, mode: str) -> None:
    events = run(embedded, spec_for(embedded, settings_of(mode), steps=STEPS, workload="regression/steep"))
    assert result_of(events).failure is None
    ranks = 4 if mode in AVERAGING else 1
    steps = standing_steps(events)
    expected = steep_steps(STEPS)
    assert len(expected) == 3
    assert [(step.step, step.skipped) for step in steps if step.skipped] == [(each, ranks) for each in expected]
    # The step that overflows still has the scale that it overflowed with.
    assert (steps[0].loss_scale, steps[expected[0] - 1].loss_scale) == (INITIAL_SCALE, INITIAL_SCALE)
    assert steps[expected[0]].loss_scale == INITIAL_SCALE / 2
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    snapshot = last_snapshot(events)
    assert len(set(digests(snapshot, "model"))) == 1
    assert all(weight.isfinite().all() for weight in tensors(embedded, snapshot, "model").values())
    assert result_of(events).heldout_curve[-1].loss < result_of(events).heldout_curve[0].loss
    if mode in AVERAGING:
        state = {"scale": INITIAL_SCALE / 8, "good_steps": STEPS - expected[-1]}
        assert numbers_of(embedded, snapshot) == [state] * 4


@pytest.mark.parametrize("codec", [{"compress.codec": "topk"}, {"compress.codec": "powersgd", "compress.rank": 1}])
def test_a_skipped_step_leaves_no_trace_but_the_scale(embedded: EmbeddedRuntime, codec: Settings) -> None:
    """Neither in weights, nor in the optimizer, nor in what a codec keeps."""
    spec = spec_for(embedded, settings_of("allreduce", **codec), steps=8, workload="regression/steep", snapshot_every=1)
    events = run(embedded, spec)
    snapshots = {event.snapshot.step: event.snapshot for event in events if isinstance(event, SnapshotTaken)}
    (skipped,) = steep_steps(8)
    assert 1 < skipped < 8
    for part in STATE:
        assert digests(snapshots[skipped], part) == digests(snapshots[skipped - 1], part), part
    assert digests(snapshots[skipped + 1], "model") != digests(snapshots[skipped], "model")
    assert digests(snapshots[skipped + 1], "residuals") != digests(snapshots[skipped], "residuals")


def test_layers_that_wait_lose_what_overflowed_and_nothing_else(embedded: EmbeddedRuntime) -> None:
    """In the first step that overflows no layer is exchanged, so no other rank can know."""
    settings = settings_of("allreduce", **{"sync.layer_periods": "4,5"})
    events = run(embedded, spec_for(embedded, settings, steps=STEPS, workload="regression/steep"))
    first, *others = steep_steps(STEPS)
    assert (first % 4 > 0, first % 5 > 0, [each % 4 for each in others]) == (True, True, [0, 0])
    assert [step.step for step in standing_steps(events) if step.skipped] == others
    snapshot = last_snapshot(events)
    assert len(set(digests(snapshot, "model"))) == 1
    for part, rank in itertools.product(("model", "residuals"), range(4)):
        assert all(tensor.isfinite().all() for tensor in tensors(embedded, snapshot, part, rank).values())
    scales = sorted(numbers["scale"] for numbers in numbers_of(embedded, snapshot))
    assert scales == [INITIAL_SCALE / 8] + 3 * [INITIAL_SCALE / 4]


@pytest.mark.parametrize("settings", [{}, {"compress.codec": "topk"}], ids=str)
@pytest.mark.parametrize("mode", ["allreduce", "local_sgd", "async"])
def test_restored_job_in_fp16_equals_the_uninterrupted_one(
    embedded: EmbeddedRuntime, mode: str, settings: Settings
) -> None:
    fields = {"workload": "regression/steep", "steps": STEPS}
    chosen = settings_of(mode, **settings)
    whole = run(embedded, spec_for(embedded, chosen, **fields))
    half = run(embedded, spec_for(embedded, chosen, **fields, snapshot_every=10))
    middle = next(event.snapshot for event in half if isinstance(event, SnapshotTaken))
    assert middle.step == 10
    assert steep_steps(10)
    rest = spec_for(embedded, chosen, workload="regression/steep", steps=10, start_snapshot=middle.snapshot_id)
    second = run(embedded, rest)
    for part in (*STATE, "rng", "numbers"):
        assert digests(last_snapshot(second), part) == digests(last_snapshot(whole), part), part


def test_fp16_is_close_to_fp32_before_anything_overflows(embedded: EmbeddedRuntime) -> None:
    def trained(precision: str) -> torch.Tensor:
        spec = spec_for(embedded, {"precision.compute": precision}, steps=2, workload="regression/steep")
        events = run(embedded, spec)
        assert not any(step.skipped for step in standing_steps(events))
        weights = tensors(embedded, last_snapshot(events), "model")
        return torch.cat([weights[name].reshape(-1) for name in sorted(weights)])

    exact = trained("fp32")
    error = torch.linalg.vector_norm(trained("fp16") - exact)
    assert 0 < error < 5e-3 * torch.linalg.vector_norm(exact)
