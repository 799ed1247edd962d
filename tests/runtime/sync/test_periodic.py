"""Modes that average parameters compute what the papers say, in every one of their forms."""

import pytest
import torch

from paceline.runtime import mapping
from paceline.runtime.domain.events import SnapshotTaken
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.mapping.levels import Level
from tests.runtime.support import (
    Settings,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    spec_for,
    standing_steps,
    tensors,
)
from tests.runtime.sync.simulation import Fragment, Simulation
from tests.runtime.test_sync_conformance import assert_restores, one_process_reference

FIRST, SECOND = ("0.weight",), ("0.bias", "4.weight", "4.bias")
"""The 48 and 26 elements that the model of 74 is cut into."""
WHOLE = (*FIRST, *SECOND)
STEPS = 11
UNEVEN: Settings = {"mapping.batch_share": "5,1,2,1"}
STREAMED: Settings = {"sync.period": 4, "sync.fragments": 2, "sync.delay": 2}
"""While one fragment travels, the other does not."""
DENSE: Settings = {"sync.period": 4, "sync.fragments": 4, "sync.delay": 3}
"""Something always is under way."""


@pytest.fixture
def two_racks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes ranks 0 and 1, and 2 and 3, for two racks."""
    monkeypatch.setattr(mapping, "tier_levels", lambda *_: (Level(name="rack", groups=(0, 0, 1, 1)),))


def every(period: int, phase: int = 0) -> tuple[int, ...]:
    """Steps."""
    return tuple(step for step in range(1, STEPS) if step % period == phase)


def assert_as_simulated(embedded: EmbeddedRuntime, settings: Settings, simulation: Simulation) -> None:
    """All replicas, one step before the trial ends and so brings them together."""
    spec = spec_for(embedded, settings, steps=STEPS, workload="regression/momentum", snapshot_every=STEPS - 1)
    events = list(embedded.run_trial(spec))
    assert result_of(events).failure is None
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    for step in standing_steps(events)[:-1]:
        simulation.step(step.step, step.samples)
    snapshot = next(event.snapshot for event in events if isinstance(event, SnapshotTaken))
    for rank in range(4):
        expected, trained = simulation.weights(rank), tensors(embedded, snapshot, "model", rank)
        for name in expected:
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("fragments", [(WHOLE,), (FIRST, SECOND)], ids=["whole", "two"])
@pytest.mark.parametrize(("mode", "outer"), [("local_sgd", (1.0, 0.0)), ("diloco", (0.7, 0.9)), ("diloco", (0.5, 0.0))])
def test_replicas_are_as_simulated(
    embedded: EmbeddedRuntime, mode: str, outer: tuple[float, float], fragments: tuple[tuple[str, ...], ...], delay: int
) -> None:
    count, period = len(fragments), 4
    parts = [
        Fragment(names=names, steps=every(period, period * (index + 1) // count % period), delay=delay)
        for index, names in enumerate(fragments)
    ]
    simulation = Simulation(parts, outer_lr=outer[0], outer_momentum=outer[1])
    settings: Settings = {"sync.mode": mode, "sync.period": period, "sync.fragments": count, "sync.delay": delay}
    if mode == "diloco":
        settings = {**settings, "sync.outer_lr": outer[0], "sync.outer_momentum": outer[1]}
    assert_as_simulated(embedded, {**settings, **UNEVEN}, simulation)


def test_delay_ends_before_the_next_averaging_starts(embedded: EmbeddedRuntime) -> None:
    simulation = Simulation([Fragment(names=WHOLE, steps=every(3), delay=2)])
    assert_as_simulated(embedded, {"sync.mode": "local_sgd", "sync.period": 3, "sync.delay": 16}, simulation)


def test_layers_of_longer_periods_are_averaged_less_often(embedded: EmbeddedRuntime) -> None:
    simulation = Simulation([Fragment(names=FIRST, steps=every(2)), Fragment(names=SECOND, steps=every(6))])
    assert_as_simulated(embedded, {"sync.mode": "local_sgd", "sync.period": 2, "sync.layer_periods": "1,3"}, simulation)


@pytest.mark.parametrize("streamed", [{}, {"sync.fragments": 2, "sync.delay": 1}], ids=["whole", "streamed"])
def test_racks_train_synchronously_and_drift_apart(
    embedded: EmbeddedRuntime, two_racks: None, streamed: Settings
) -> None:
    fragments = [Fragment(names=WHOLE, steps=every(4))]
    if streamed:
        fragments = [
            Fragment(names=FIRST, steps=every(4, 2), delay=1),
            Fragment(names=SECOND, steps=every(4), delay=1),
        ]
    simulation = Simulation(fragments, groups=(0, 0, 1, 1), outer_lr=0.7, outer_momentum=0.9)
    settings = {"sync.mode": "diloco", "sync.period": 4, "sync.inner": "tier", **streamed, **UNEVEN}
    assert_as_simulated(embedded, settings, simulation)


def test_without_tiers_all_ranks_are_one_group(embedded: EmbeddedRuntime) -> None:
    settings: Settings = {"sync.mode": "local_sgd", "sync.period": 3, "sync.inner": "tier", **UNEVEN}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=8)))
    trained = tensors(embedded, last_snapshot(events), "model")
    for name, expected in one_process_reference("regression", steps=8).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)


def test_outer_optimizer_that_goes_the_whole_way_is_local_sgd_bit_for_bit(embedded: EmbeddedRuntime) -> None:
    def weights(settings: Settings) -> list[str]:
        spec = spec_for(embedded, {"sync.period": 3, **settings, **UNEVEN}, steps=STEPS, workload="regression/momentum")
        return digests(last_snapshot(list(embedded.run_trial(spec))), "model")

    whole_way: Settings = {"sync.mode": "diloco", "sync.outer_lr": 1.0, "sync.outer_momentum": 0.0}
    assert weights(whole_way) == weights({"sync.mode": "local_sgd"})


def test_outer_momentum_is_equal_on_all_ranks(embedded: EmbeddedRuntime) -> None:
    spec = spec_for(embedded, {"sync.mode": "diloco", "sync.period": 3, **UNEVEN}, steps=7, snapshot_every=7)
    snapshot = last_snapshot(list(embedded.run_trial(spec)))
    states = [tensors(embedded, snapshot, "sync", rank) for rank in range(4)]
    for name, velocity in states[0].items():
        if name.startswith("velocity."):
            assert velocity.abs().max() > 0
            assert all(torch.equal(state[name], velocity) for state in states)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("fragments", "bytes_at"),
    [(1, {4: 74, 8: 74}), (2, {2: 48, 4: 26, 6: 48, 8: 26}), (4, {2: 48, 3: 8, 4: 18, 6: 48, 7: 8, 8: 18})],
)
def test_fragments_travel_in_turns(
    embedded: EmbeddedRuntime, fragments: int, bytes_at: dict[int, int], delay: int
) -> None:
    settings: Settings = {"sync.mode": "local_sgd", "sync.period": 4, "sync.fragments": fragments, "sync.delay": delay}
    steps = standing_steps(list(embedded.run_trial(spec_for(embedded, settings, steps=8))))
    found = {step.step: step.wire_bytes for step in steps if step.wire_bytes}
    assert found == {step: {"cluster": 2 * 3 * 4 * elements} for step, elements in bytes_at.items()}


@pytest.mark.parametrize("codec", ["none", "topk", "powersgd", "randomk"])
@pytest.mark.parametrize(
    "settings",
    [
        {"sync.mode": "local_sgd", **STREAMED},
        {"sync.mode": "diloco", **DENSE},
        {"sync.mode": "diloco", **STREAMED, "sync.layer_periods": "1,2"},
        {"sync.mode": "diloco", **STREAMED, "sync.inner": "tier"},
    ],
    ids=["streamed", "dense", "layers", "inner"],
)
def test_restored_job_equals_the_uninterrupted_one_bit_for_bit(
    embedded: EmbeddedRuntime, two_racks: None, settings: Settings, codec: str
) -> None:
    assert_restores(embedded, {**settings, "compress.codec": codec})


@pytest.mark.parametrize("settings", [STREAMED, DENSE, {"sync.inner": "tier"}], ids=["streamed", "dense", "inner"])
def test_replicas_with_buffers_end_equal(embedded: EmbeddedRuntime, two_racks: None, settings: Settings) -> None:
    spec = spec_for(embedded, {"sync.mode": "local_sgd", **settings}, steps=STEPS, workload="regression/norm")
    assert len(set(digests(last_snapshot(list(embedded.run_trial(spec))), "model"))) == 1
