"""Which stages there are, how long they last, and what one fails by: rules, without a runtime."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import StepSplit
from paceline.runtime.knobs import knob_space
from paceline.runtime.server.phases import PhaseWatch, stages, trouble

LOW: dict[str, KnobValue] = {"precision.compute": "bf16", "compress.codec": "topk", "compress.ratio": 0.1}


def target(phases: str, *, steps: int = 10, low: dict[str, KnobValue] = LOW) -> Strategy:
    return knob_space().strategy({"precision.phases": phases, "precision.phase_steps": steps, **low})


def done(step: int, loss: float = 1.0, **fields: float) -> StepDone:
    made = StepDone(
        step=step, generation=1, seconds=1.0, split=StepSplit(), loss=loss, wire_bytes={}, samples=(),
        noise_scale=None, load_balance_error=0.0, compute_seconds=(1.0,), optimizer_seconds=(0.0,), staleness=(0,),
        skipped=0, loss_scale=1.0, exchange_seconds=0.0,
    )  # fmt: skip
    return dataclasses.replace(made, **fields)


def turns(strategy: Strategy, losses: Sequence[float], *, begun: int = 0) -> list[tuple[int, int]]:
    """(step after which a stage began, its number), as each is entered at once; 1 is the first."""
    watch, order = PhaseWatch(strategy, begun=begun, step=begun), stages(strategy)
    found = [(begun, 1 + order.index(watch.turn()))]
    for step, loss in enumerate(losses, start=begun + 1):
        if watch.add(done(step, loss)):
            found.append((step, 1 + order.index(watch.turn())))
            watch.enter(step)
    return found


def test_stages_change_compute_before_the_codec() -> None:
    first, second, third = (stage.differences(knob_space().default) for stage in stages(target("steps")))
    phases = {"precision.phases": "steps", "precision.phase_steps": 10}
    assert first == phases
    assert second == {**phases, "precision.compute": "bf16"}
    assert third == {**phases, **LOW}


@pytest.mark.parametrize(
    ("low", "count"),
    [({}, 1), ({"precision.compute": "bf16"}, 2), ({"compress.codec": "fp16", "precision.reduce": "fp32"}, 2)],
)
def test_stages_that_change_nothing_are_left_out(low: dict[str, KnobValue], count: int) -> None:
    assert len(stages(target("stable", low=low))) == count
    assert len(stages(knob_space().strategy(low))) == 1


@pytest.mark.parametrize("name", [name for knob in knob_space().knobs if knob.name == "compress.codec"
                                  for name in knob.domain.grid(99)])  # fmt: skip
def test_every_codec_has_legal_stages(name: str) -> None:
    modes = [mode for mode in knob_space()["sync.mode"].domain.grid(99)
             if knob_space().is_legal({"compress.codec": name, "sync.mode": mode})]  # fmt: skip
    for mode in modes:
        found = stages(target("steps", low={"precision.compute": "bf16", "compress.codec": name, "sync.mode": mode}))
        assert {stage["sync.mode"] for stage in found} == {mode}
        assert found[0]["compress.codec"] == "none"


@pytest.mark.parametrize("begun", [0, 7])
def test_by_steps_each_stage_lasts_as_long_as_set(begun: int) -> None:
    assert turns(target("steps"), [1.0] * 50, begun=begun) == [(begun, 1), (begun + 10, 2), (begun + 20, 3)]


@pytest.mark.parametrize(
    ("step", "stage", "ends_at"), [(0, 1, 10), (9, 1, 10), (10, 2, 20), (19, 2, 20), (40, 3, None)]
)
def test_a_snapshot_is_gone_on_from_in_its_stage(step: int, stage: int, ends_at: int | None) -> None:
    watch = PhaseWatch(target("steps"), begun=0, step=step)
    assert stages(target("steps")).index(watch.turn()) == stage - 1
    assert watch.ends_at == ends_at


def with_spikes(count: int, *steps: int, size: float = 100.0) -> list[float]:
    return [size if step in steps else 1.0 for step in range(1, count + 1)]


def test_a_spike_goes_back_one_stage_which_then_lasts_twice_as_long() -> None:
    assert turns(target("steps"), with_spikes(70, 15)) == [(0, 1), (10, 2), (15, 1), (35, 2), (45, 3)]
    assert turns(target("steps"), with_spikes(70, 25)) == [(0, 1), (10, 2), (20, 3), (25, 2), (45, 3)]


def test_each_stage_fails_once() -> None:
    """Later spikes are borne, also by the stage that comes next."""
    assert turns(target("steps"), with_spikes(100, 15, 38, 55, 85)) == [
        *((0, 1), (10, 2), (15, 1), (35, 2), (45, 3)),
        *((55, 2), (75, 3)),
    ]


def test_the_first_stage_and_strategies_without_phases_cannot_go_back() -> None:
    assert turns(target("steps"), with_spikes(9, 8)) == [(0, 1)]
    assert turns(knob_space().strategy(LOW), with_spikes(30, 8, 20)) == [(0, 1)]


@pytest.mark.parametrize("wrong", [done(15, math.nan), done(15, math.inf), done(15, skipped=1)], ids=str)
def test_what_is_not_finite_fails_a_stage_once_and_is_trouble_ever_after(wrong: StepDone) -> None:
    watch = PhaseWatch(target("steps"), begun=0, step=0)
    for step in range(1, 11):
        watch.add(done(step))
    watch.turn()
    watch.enter(10)
    assert trouble(wrong)
    assert watch.add(wrong)
    assert watch.falls_back
    watch.turn()
    watch.enter(15)
    assert (watch.due, watch.ends_at) == (False, 35)
    for step in range(16, 36):
        watch.add(done(step))
    watch.turn()
    watch.enter(35)
    watch.add(dataclasses.replace(wrong, step=36))
    assert not watch.falls_back


def test_an_overflow_that_the_loss_scale_answers_is_no_trouble() -> None:
    assert trouble(done(1, skipped=4, loss_scale=2.0)) is None
    assert trouble(done(1, skipped=4, loss_scale=1.0)) == "the gradient is not finite at step 1"
    assert trouble(done(3, math.nan)) == "the training loss is nan at step 3"


def noisy(length: int, *, noise: float, fall: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    return (float(math.exp(-fall * step) * (1 + noise * rng.standard_normal())) for step in range(length))


@given(seed=st.integers(0, 10**6), fall=st.floats(0.0, 0.05))
def test_noise_of_a_tenth_never_counts_as_a_spike(seed: int, fall: float) -> None:
    losses = list(noisy(200, noise=0.1, fall=fall, seed=seed))
    assert turns(target("steps"), losses) == [(0, 1), (10, 2), (20, 3)]


@given(seed=st.integers(0, 10**6), at=st.integers(26, 60))
def test_a_level_twice_as_high_counts_within_twenty_steps(seed: int, at: int) -> None:
    losses = [loss * (2.0 if step > at else 1.0) for step, loss in enumerate(noisy(100, noise=0.1, fall=0, seed=seed))]
    (back, stage), *_ = turns(target("steps"), losses)[3:]
    assert stage == 2
    assert at < back <= at + 20


@given(seed=st.integers(0, 10**6))
def test_a_falling_loss_with_little_noise_is_stable_as_soon_as_it_can_be(seed: int) -> None:
    losses = list(noisy(60, noise=0.02, fall=0.05, seed=seed))
    assert turns(target("stable"), losses) == [(0, 1), (10, 2), (20, 3)]


def test_a_rising_or_a_jumping_loss_is_not_stable() -> None:
    assert turns(target("stable"), [1.0 + step / 1000 for step in range(60)]) == [(0, 1)]
    assert turns(target("stable"), [2.0 if step % 2 else 0.5 for step in range(60)]) == [(0, 1)]
    # Once it settles, it is: when the window holds nothing else.
    losses = [2.0, 0.5] * 15 + [1.0] * 20
    (_, (begun, stage), *_) = turns(target("stable"), losses)
    assert stage == 2
    assert 30 < begun <= 40


def test_losses_near_zero_may_vary_by_a_part_of_the_first() -> None:
    losses = itertools.chain([10.0] * 5, itertools.cycle([0.1, 0.01, 0.15]))
    assert turns(target("steps"), list(itertools.islice(losses, 40))) == [(0, 1), (10, 2), (20, 3)]
