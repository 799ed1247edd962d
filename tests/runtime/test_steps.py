"""Steps of the job from reports of the ranks; intervals, efficiency and noise scale from steps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.convert import to_message
from paceline.runtime.domain.trial import HeldOutPoint, StepSplit
from paceline.runtime.measure import StepReport
from paceline.runtime.server.steps import (
    StepCollector,
    load_balance_error,
    noise_scale,
    statistical_efficiency,
    throughput,
)

SHARES = (3, 1, 2)


def report(step: int, rank: int, *, generation: int = 1, seconds: float = 1.0) -> control_pb2.StepReport:
    start = (step - 1) * sum(SHARES) + sum(SHARES[:rank])
    found = StepReport(
        step=step,
        generation=generation,
        rank=rank,
        seconds=seconds,
        split=StepSplit(compute=seconds),
        optimizer_seconds=0.0,
        loss=float(rank),
        sample_start=start,
        sample_stop=start + SHARES[rank],
        wire_bytes={"cluster": 10 * (rank + 1)},
    )
    return to_message(found, control_pb2.StepReport)


@given(st.permutations([(step, rank) for step in range(1, 5) for rank in range(3)]))
def test_steps_come_out_whole_and_in_order(arrivals: list[tuple[int, int]]) -> None:
    collector = StepCollector(1, SHARES, step=0, cursor=0)
    steps = [done for step, rank in arrivals for done in collector.add([report(step, rank)])]
    assert [done.step for done in steps] == [1, 2, 3, 4]
    for done in steps:
        base = (done.step - 1) * 6
        assert done.samples == ((base, base + 3), (base + 3, base + 4), (base + 4, base + 6))
        assert done.wire_bytes == {"cluster": 60}
        assert done.loss == pytest.approx((0 * 3 + 1 * 1 + 2 * 2) / 6)


def test_parts_of_a_step_may_come_from_any_rank() -> None:
    collector, steps = StepCollector(1, SHARES, step=0, cursor=0), []
    for part, rank, staleness in ((0, 0, 2), (2, 0, 1), (1, 1, 0)):
        message = report(1, part)
        message.rank, message.staleness = rank, staleness
        steps += collector.add([message])
    (done,) = steps
    assert done.samples == ((0, 3), (3, 4), (4, 6))
    assert done.staleness == (2, 0, 1)


def test_reports_of_another_generation_do_not_count() -> None:
    collector = StepCollector(2, SHARES, step=0, cursor=0)
    assert [collector.add([report(1, rank)]) for rank in range(3)] == [[], [], []]


def test_an_agreed_step_counts_although_a_dead_rank_never_reported_it() -> None:
    collector = StepCollector(1, SHARES, step=0, cursor=0)
    for rank in (0, 2):
        collector.add([report(1, rank), report(2, rank), report(3, rank)])
    steps = collector.finish(2)
    assert [done.step for done in steps] == [1, 2]
    assert steps[1].samples == ((6, 9), (9, 10), (10, 12))


def curve(*points: tuple[int, float]) -> list[HeldOutPoint]:
    return [HeldOutPoint(seconds=float(samples), samples=samples, loss=loss) for samples, loss in points]


REFERENCE = curve((0, 4.0), (100, 3.0), (200, 2.0))


@pytest.mark.parametrize(
    ("trial", "efficiency"),
    [
        (REFERENCE, 1.0),
        (curve((0, 4.0), (50, 3.0), (100, 2.0)), 2.0),
        (curve((0, 4.0), (200, 3.0), (400, 2.0)), 0.5),
        (curve((0, 4.0), (200, 3.0)), 0.5),
        (curve((0, 4.0), (200, 2.5), (210, 9.0)), 0.75),
        (curve((0, 4.0), (100, 4.5)), 0.0),
        (curve((0, 4.0), (100, math.nan)), 0.0),
        ([], 0.0),
    ],
)
def test_efficiency_compares_samples_to_a_loss_both_reached(trial: list[HeldOutPoint], efficiency: float) -> None:
    assert statistical_efficiency(trial, REFERENCE) == pytest.approx(efficiency)


def test_the_interval_holds_the_rate_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        seconds = generator.gamma(25.0, 0.1 / 25.0, size=60).tolist()
        _, (low, high) = throughput([10] * 60, seconds)
        held += low <= 100.0 <= high
    # 95 % of 400, give or take four standard deviations of a binomial.
    assert 362 <= held <= 397


def test_too_few_steps_give_no_bound() -> None:
    assert throughput([10], [0.1]) == (pytest.approx(100.0), (0.0, math.inf))
    assert throughput([], []) == (0.0, (0.0, math.inf))


def test_load_balance_error() -> None:
    assert load_balance_error([1.0, 1.0, 2.0]) == pytest.approx(0.5)
    assert load_balance_error([0.0, 0.0]) == 0.0


def test_noise_scale_recovers_the_truth() -> None:
    """Gradients g + noise of covariance S/b: the estimate is trace(S)/|g|^2."""
    generator = np.random.default_rng(1)
    ranks, share, dimension, true_scale = 4, 8, 2000, 40.0
    gradient = generator.standard_normal(dimension)
    deviation = math.sqrt(true_scale * float(gradient @ gradient) / dimension)
    local = gradient + deviation / math.sqrt(share) * generator.standard_normal((ranks, dimension))
    mean = local.mean(axis=0)
    reports = [
        StepReport(
            step=1,
            generation=1,
            rank=rank,
            seconds=1.0,
            split=StepSplit(),
            loss=0.0,
            sample_start=rank * share,
            sample_stop=(rank + 1) * share,
            optimizer_seconds=0.0,
            local_square_norm=float(own @ own),
            mean_square_norm=float(mean @ mean),
        )
        for rank, own in enumerate(local)
    ]
    assert noise_scale(reports) == pytest.approx(true_scale, rel=0.15)
    assert noise_scale(reports[:1]) is None
