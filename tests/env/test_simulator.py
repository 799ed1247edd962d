"""The cost model against hand-computed figures and the directions in which it must move."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.env.demand import demand
from paceline.env.simulator import LAUNCH_SECONDS, OPTIMIZER_PASSES, Prediction, Unknowns, simulate
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Categorical, Number
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space
from tests.env.simulated import ideal, scenario

ClusterOf = Callable[..., Cluster]


def test_step_of_two_devices_by_hand(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    strategy = space.strategy({"sync.bucket_mb": 1.0})
    prediction = simulate(workload, cluster_of("a", "b"), [strategy], ideal())
    # 4 MB in 4 buckets: each rank sends 2(n-1)/n = 1 times the gradient at 100 MB/s, and waits 4 x 1 ms.
    exchange = 4e6 / 1e8 + 4 * 1e-3
    compute = 8 * 1e6 / 1e9 + 10 * LAUNCH_SECONDS + OPTIMIZER_PASSES * 4e6 / 1e10
    assert prediction.exposed_seconds[0, 0] == pytest.approx(exchange)
    assert prediction.step_seconds[0, 0] == pytest.approx(compute + exchange)
    assert prediction.efficiency[0, 0] == 1.0
    assert prediction.goodput[0, 0] == pytest.approx(16 / (compute + exchange))


def test_overlap_hides_all_but_one_bucket(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    strategies = [space.strategy({"sync.bucket_mb": size}) for size in (1.0, 25.0)]
    fast = cluster_of("a", "b", bandwidth=1e10)
    prediction = simulate(workload, fast, strategies, ideal(overlap=1.0))
    exchange = 4e6 / 1e10 + 4 * 1e-3
    assert prediction.hidden_seconds[0, 0] == pytest.approx(3 / 4 * exchange)
    assert prediction.hidden_seconds[1, 0] == 0.0


def test_local_sgd_divides_the_exchange_by_its_period(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    strategies = [space.strategy({"sync.mode": "local_sgd", "sync.period": period}) for period in (1, 8)]
    prediction = simulate(workload, cluster_of("a", "b"), strategies, ideal(period_sensitivity=0.1))
    assert prediction.exposed_seconds[0, 0] == pytest.approx(8 * prediction.exposed_seconds[1, 0])
    assert prediction.efficiency[:, 0] == pytest.approx([1.0, 1 / 1.7])


def test_stragglers_hold_all_ranks(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    unequal = cluster_of("a", "b", flops=(3e9, 1e9))
    strategies = [space.strategy({"mapping.batch_share": shares}) for shares in ("even", "3,1")]
    prediction = simulate(workload, unequal, strategies, ideal())
    assert prediction.demand.slowest_work == pytest.approx([8e-3, 4e-3])
    assert prediction.demand.load_balance_error == pytest.approx([0.5, 0.0])
    assert prediction.step_seconds[0, 0] - prediction.step_seconds[1, 0] == pytest.approx(4e-3)


def test_contention_only_where_a_node_is_shared(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    strategy = space.strategy({"sync.bucket_mb": 1.0})
    seconds = {
        nodes: simulate(workload, cluster_of(*nodes), [strategy], ideal(overlap=1.0, contention=contention))
        for nodes, contention in (("ab", 1.0), ("aa", 1.0))
    }
    hidden = seconds["aa"].hidden_seconds[0, 0]
    assert hidden > 0
    difference = seconds["aa"].step_seconds[0, 0] - seconds["ab"].step_seconds[0, 0]
    assert difference == pytest.approx(hidden)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_wire_bytes(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf, ranks: int) -> None:
    changes = (
        {},
        {"compress.codec": "bf16"},
        {"compress.codec": "topk", "compress.ratio": 0.01},
        {"sync.mode": "local_sgd", "sync.period": 8},
    )
    strategies = [space.strategy(setting) for setting in changes]
    facts = demand(workload, cluster_of(*"a" * ranks), strategies)
    all_reduce = 2 * (ranks - 1) * 4e6
    # Ten thousand values and as many indices, four bytes each, from each rank to each other.
    all_gather = ranks * (ranks - 1) * 8e4
    assert facts.tiers == ("cluster",)
    assert facts.wire_bytes[:, 0] == pytest.approx([all_reduce, all_reduce / 2, all_gather, all_reduce / 8])


def test_unknown_knobs_and_values_have_no_effect(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    codec = Knob(name="compress.codec", doc="", domain=Categorical(choices=("none", "novel")), default="none")
    other = Knob(name="data.prefetch", doc="", domain=Number(low=0, high=8, integer=True), default=2)
    knobs = [knob for knob in space.knobs if knob.name != "compress.codec"]
    wider = KnobSpace(knobs=(*knobs, codec, other))
    changes = ({}, {"compress.codec": "novel"}, {"data.prefetch": 8})
    strategies = [wider.strategy(setting) for setting in changes]
    draws = Unknowns.sample(np.random.default_rng(0), 8)
    goodput = simulate(workload, cluster_of("a", "b"), strategies, draws).goodput
    np.testing.assert_array_equal(goodput, np.broadcast_to(goodput[0], goodput.shape))


def test_failures_are_predicted(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    no_feedback = {"compress.codec": "topk", "compress.ratio": 0.001, "compress.error_feedback": False}
    strategies = [space.default, space.strategy(no_feedback)]
    draw = ideal(compression_sensitivity=1.0)
    prediction = simulate(workload, cluster_of("a", "b"), strategies, draw)
    assert prediction.diverged[:, 0].tolist() == [False, True]
    assert not prediction.out_of_memory.any()
    cramped = simulate(workload, cluster_of("a", "b", memory=1e7), strategies, draw)
    assert cramped.out_of_memory.all()
    assert cramped.failure_probability.tolist() == [1.0, 1.0]


def test_a_cluster_without_its_links_is_refused(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cut = dataclasses.replace(cluster_of("a", "b"), links=())
    with pytest.raises(InvalidRequest, match="no link a->b"):
        simulate(workload, cut, [space.default], ideal())


@pytest.mark.parametrize(("flops", "bandwidth"), [(5e-324, 1e8), (1e9, 5e-324)])
def test_overflow_is_refused(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf, flops: float, bandwidth: float
) -> None:
    absurd = cluster_of("a", "b", flops=(flops, flops), bandwidth=bandwidth)
    with pytest.raises(InvalidRequest, match="step times overflow"):
        simulate(workload, absurd, [space.default], ideal())


def test_many_strategies_are_as_many_single_ones() -> None:
    workload, cluster, strategies, draws = scenario(3)
    together = simulate(workload, cluster, strategies, draws)
    assert together.goodput.shape == (len(strategies), 16)
    for row, strategy in enumerate(strategies):
        alone = simulate(workload, cluster, [strategy], draws)
        np.testing.assert_array_equal(together.goodput[row], alone.goodput[0])


def all_finite_and_positive(prediction: Prediction) -> bool:
    return all(
        np.isfinite(array).all() and (array > 0).all()
        for array in (prediction.step_seconds, prediction.goodput, prediction.efficiency)
    )


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1.01, 1e3))
def test_a_slower_link_makes_nothing_faster(seed: int, factor: float) -> None:
    workload, cluster, strategies, draws = scenario(seed)
    links = tuple(
        dataclasses.replace(link, bandwidth=link.bandwidth / factor, alone=link.alone / factor)
        for link in cluster.links
    )
    before = simulate(workload, cluster, strategies, draws)
    after = simulate(workload, dataclasses.replace(cluster, links=links), strategies, draws)
    assert all_finite_and_positive(before)
    assert (after.step_seconds >= before.step_seconds * (1 - 1e-12)).all()


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), factor=st.floats(1.01, 1e3))
def test_more_work_makes_nothing_faster(seed: int, factor: float) -> None:
    workload, cluster, strategies, draws = scenario(seed)
    harder = dataclasses.replace(workload, flops_per_sample=workload.flops_per_sample * factor)
    before = simulate(workload, cluster, strategies, draws).step_seconds
    assert (simulate(harder, cluster, strategies, draws).step_seconds >= before * (1 - 1e-12)).all()


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), periods=st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_a_longer_period_sends_no_more_and_learns_no_better(seed: int, periods: tuple[int, int]) -> None:
    workload, cluster, _, draws = scenario(seed)
    strategies = [
        knob_space().strategy({"sync.mode": "local_sgd", "sync.period": period}) for period in sorted(periods)
    ]
    prediction = simulate(workload, cluster, strategies, draws)
    sent = prediction.demand.wire_bytes
    assert (sent[1] <= sent[0]).all()
    assert (prediction.efficiency[1] <= prediction.efficiency[0]).all()
