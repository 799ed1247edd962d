"""What each sync mode and codec asks of two racks of two nodes, by hand, and which of them wins where."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from paceline.env.codecs import FEEDBACK_PASSES, PRIORS, SCATTER_PASSES
from paceline.env.demand import Demand, demand
from paceline.env.simulator import DAMPED, OUTER_MISMATCH, SLOWED, simulate
from paceline.runtime.compress import CODECS
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from tests.env.simulated import ideal

ClusterOf = Callable[..., Cluster]
Settings = dict[str, KnobValue]

GRADIENT = 4e6
RACKS = ("ab", "cd")
RING = 2 * 3 / 4 * GRADIENT
"""What each of four ranks sends in a ring."""


@pytest.fixture
def facts_of(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> Callable[..., Demand]:
    """The figures of strategies on two racks of two nodes, ranks in the order of racks unless said otherwise."""

    def facts(*settings: Settings, nodes: str = "abcd") -> Demand:
        return demand(workload, cluster_of(*nodes, racks=RACKS), [space.strategy(each) for each in settings])

    return facts


@pytest.mark.parametrize(
    ("settings", "rack", "outermost"),
    [
        # Two of four hops cross.
        ({}, 2 * RING, 2 * RING),
        # Every pair sends each other two parts of a quarter, and eight of twelve ordered pairs cross.
        ({"sync.mode": "reduction_server"}, 4 * GRADIENT / 2, 8 * GRADIENT / 2),
        # In a rack, two sum up halves; across, two halves of them.
        ({"sync.mode": "hierarchical"}, 4 * GRADIENT, 4 * GRADIENT / 2),
        # Every rank sends a gradient to the three other quarters, and pulls them.
        ({"sync.mode": "async"}, 4 * GRADIENT / 2, 8 * GRADIENT / 2),
        ({"sync.mode": "async", "compress.codec": "fp16"}, 4 * GRADIENT * 3 / 8, 8 * GRADIENT * 3 / 8),
        ({"sync.mode": "local_sgd", "sync.period": 4}, 2 * RING / 4, 2 * RING / 4),
        ({"sync.mode": "diloco", "sync.period": 4, "sync.fragments": 4, "sync.delay": 1}, 2 * RING / 4, 2 * RING / 4),
        # A ring of two in each rack every step, and a hierarchical exchange every fourth.
        ({"sync.mode": "local_sgd", "sync.period": 4, "sync.inner": "tier"}, 5 * GRADIENT, GRADIENT / 2),
        (
            {"sync.mode": "local_sgd", "sync.period": 4, "sync.inner": "tier", "compress.codec": "fp16"},
            5 * GRADIENT,
            GRADIENT / 4,
        ),
        # Half of the layers every third time.
        ({"sync.layer_periods": "1,3"}, 2 * RING * 2 / 3, 2 * RING * 2 / 3),
        (
            {"sync.mode": "local_sgd", "sync.period": 4, "sync.layer_periods": "1,3"},
            2 * RING * 2 / 3 / 4,
            2 * RING * 2 / 3 / 4,
        ),
    ],
)
def test_bytes_of_the_modes(facts_of: Callable[..., Demand], settings: Settings, rack: float, outermost: float) -> None:
    assert facts_of(settings).wire_bytes[0] == pytest.approx([0, rack, outermost])


# A megabyte and 3907 scales, of four bytes; ten matrices of 316 by 316, with 1440 elements left over.
@pytest.mark.parametrize(
    ("settings", "payloads", "payload"),
    [
        ({"compress.codec": "bf16"}, 6, 2e6),
        ({"compress.codec": "bf16", "precision.reduce": "fp32"}, 6, 2e6),
        ({"compress.codec": "int8"}, 6, 1e6 + 4 * 3907),
        ({"compress.codec": "fp8", "compress.form": "gather"}, 12, 1e6 + 4 * 3907),
        ({"compress.codec": "sign"}, 6, 1e6 / 8 + 4 * 3907),
        ({"compress.codec": "topk", "compress.ratio": 0.01}, 12, 8e4),
        ({"compress.codec": "topk", "compress.ratio": 0.01, "compress.form": "owners"}, 6, 8e4),
        ({"compress.codec": "randomk", "compress.ratio": 0.01}, 6, 4e4),
        ({"compress.codec": "powersgd", "compress.rank": 4}, 6, 4 * (10 * 4 * 632 + 1440)),
    ],
)
def test_bytes_of_the_codecs(
    facts_of: Callable[..., Demand], settings: Settings, payloads: int, payload: float
) -> None:
    assert facts_of(settings).wire_bytes[0].sum() == pytest.approx(payloads * payload)


def test_owners_cross_the_uplinks_more_than_a_ring_in_rack_order(facts_of: Callable[..., Demand]) -> None:
    fp32 = {"compress.codec": "bf16", "precision.reduce": "fp32"}
    strategies = ({}, {"sync.mode": "reduction_server"}, {"compress.codec": "bf16"}, fp32)
    latency = 1e-3
    # Four flows of half a gradient leave each rack, where a ring has one of 3/2.
    ring, beside, half_ring, owners = facts_of(*strategies).pipelined_seconds
    assert ring == pytest.approx(RING / 1.25e7 + latency)
    assert beside == pytest.approx(2 * GRADIENT / 1.25e7 + latency)
    assert half_ring < owners
    # In the worst order two flows leave each rack.
    ring, beside, half_ring, owners = facts_of(*strategies, nodes="acbd").pipelined_seconds
    assert ring == pytest.approx(2 * RING / 1.25e7 + latency)
    assert beside < ring
    assert owners < half_ring


def test_two_ranks_gain_nothing_from_reducers(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    strategies = [space.strategy(each) for each in ({}, {"sync.mode": "reduction_server", "sync.chunk_mb": 16.0})]
    facts = demand(workload, cluster_of("a", "b"), strategies)
    assert facts.pipelined_seconds[1] == pytest.approx(facts.pipelined_seconds[0])
    assert facts.wire_bytes[1] == pytest.approx(facts.wire_bytes[0])


@pytest.mark.parametrize(("rate", "wins"), [(5e7, False), (2e8, True)])
def test_reducers_need_wide_links(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf, rate: float, wins: bool
) -> None:
    """Eight ranks and four reducers, which take in twice what a rank sends."""
    cluster = cluster_of(*"abcdefghijkl", racks=("abcdefghijkl",), node_rates=(5e7,) * 8 + (rate,) * 4)
    large = dataclasses.replace(workload, parameters=100_000_000)
    changes = ({}, {"sync.mode": "reduction_server", "mapping.reducers": "spare"})
    facts = demand(large, cluster, [space.strategy(each) for each in changes], world_size=8)
    assert facts.wire_bytes.sum(axis=1) == pytest.approx([14 * 4e8, 16 * 4e8])
    ring, reduced = facts.pipelined_seconds
    assert (reduced < 0.7 * ring) == wins
    assert (reduced < ring) == wins


def test_one_rank_per_device_leaves_no_device_for_reducers(facts_of: Callable[..., Demand]) -> None:
    with pytest.raises(IllegalStrategy, match="no rank runs on"):
        facts_of({"sync.mode": "reduction_server", "mapping.reducers": "spare"})


def test_fragments_take_turns(facts_of: Callable[..., Demand]) -> None:
    period = {"sync.mode": "local_sgd", "sync.period": 8}
    inner = {"sync.inner": "tier"}
    whole, turns, inside, inside_turns = facts_of(
        period, period | {"sync.fragments": 5}, period | inner, period | inner | {"sync.fragments": 5}
    ).peak_bytes
    assert whole == pytest.approx(4 * RING)
    assert turns == pytest.approx(whole / 5)
    # What racks exchange every step is not cut.
    assert inside == pytest.approx(4 * GRADIENT + 6 * GRADIENT)
    assert inside_turns == pytest.approx(4 * GRADIENT + 6 * GRADIENT / 5)


def test_a_delay_hides_exchanges_behind_steps(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    local: Settings = {"sync.mode": "local_sgd", "sync.period": 4}
    changes = (local, local | {"sync.delay": 1}, local | {"sync.delay": 1, "sync.fragments": 4})
    cluster = cluster_of(*"abcd", racks=RACKS)
    prediction = simulate(workload, cluster, [space.strategy(each) for each in changes], ideal(overlap=1.0))
    step = prediction.compute_seconds[0, 0] - 7 * GRADIENT / 1e10
    exchange = RING / 1.25e7 + 1e-3
    assert exchange > 4 * step
    assert prediction.hidden_seconds[:2, 0] == pytest.approx([0, step / 4])
    assert prediction.hidden_seconds[2, 0] == pytest.approx(step)
    assert prediction.exposed_seconds[1, 0] == pytest.approx((exchange - step) / 4)


def test_groups_that_step_together_drift_less(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    local: Settings = {"sync.mode": "local_sgd", "sync.period": 4}
    changes = (local, local | {"sync.inner": "tier"}, local | {"sync.delay": 2}, local | {"sync.layer_periods": "1,3"})
    strategies = [space.strategy(each) for each in changes]
    # Two racks instead of four ranks; two steps more until an average counts; half of the layers 12 steps apart.
    assert demand(workload, cluster_of(*"abcd", racks=RACKS), strategies).drift_steps == pytest.approx([3, 1, 5, 7])
    assert demand(workload, cluster_of(*"aaaa"), strategies).drift_steps == pytest.approx([3, 0, 5, 7])


def test_an_outer_optimizer_bears_longer_periods_at_its_best_rate(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    changes: tuple[Settings, ...] = (
        {"sync.mode": "local_sgd"},
        {"sync.mode": "diloco"},
        {"sync.mode": "diloco", "sync.outer_momentum": 0.0},
    )
    draw = ideal(period_sensitivity=0.1, outer_sensitivity=0.01, best_outer_rate=7.0)
    strategies = [space.strategy(each) for each in changes]
    efficiency = simulate(workload, cluster_of("a", "b"), strategies, draw).efficiency[:, 0]
    slow = 1 + OUTER_MISMATCH * np.log(0.1) ** 2
    assert efficiency == pytest.approx([1 / 1.7, 1 / 1.07, 1 / (1.07 * slow)])


def test_layers_that_rest_learn_less(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    strategies = [space.strategy(each) for each in ({}, {"sync.layer_periods": "1,3"})]
    prediction = simulate(workload, cluster_of("a", "b"), strategies, ideal(rest_sensitivity=0.5))
    assert prediction.efficiency[:, 0] == pytest.approx([1, 1 / 1.5])
    assert prediction.exposed_seconds[1, 0] == pytest.approx(2 / 3 * prediction.exposed_seconds[0, 0])


def test_async_waits_for_nobody_within_its_bound(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    changes: tuple[Settings, ...] = ({}, *({"sync.mode": "async", "sync.staleness": most} for most in (0, 1, 16)))
    strategies = [space.strategy(each) for each in changes]
    facts = demand(workload, cluster_of("a", "b", flops=(3e9, 1e9)), strategies)
    # Of 16 samples, of a MFLOP each, the fast device does three quarters.
    assert facts.slowest_work == pytest.approx([8e-3, 8e-3, 4e-3, 4e-3])
    assert facts.load_balance_error == pytest.approx([0.5, 0.5, 0, 0])
    # So slow a device holds all up: nobody begins a step before it has done its part of the one before the last.
    crawling = demand(workload, cluster_of("a", "b", flops=(99e9, 1e9)), strategies)
    assert crawling.slowest_work == pytest.approx([8e-3, 8e-3, 4e-3, 8e-3 / 17])


def test_async_wins_on_mixed_devices_and_pays_with_staleness(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    changes: tuple[Settings, ...] = (
        {},
        {"sync.mode": "async"},
        {"sync.mode": "async", "sync.staleness": 1},
        {"sync.mode": "async", "sync.damped": True},
    )
    strategies = [space.strategy(each) for each in changes]
    draw = ideal(overlap=1.0, jitter=0.2, staleness_sensitivity=0.1)
    harder = dataclasses.replace(workload, flops_per_sample=1e8)
    for flops, age in (((1e9,) * 4, 1.0), ((3e9, 1e9, 1e9, 1e9), 1.25)):
        prediction = simulate(harder, cluster_of(*"abcd", flops=flops, bandwidth=1e9), strategies, draw)
        assert prediction.efficiency[:, 0] == pytest.approx(
            [1, 1 / (1 + 0.1 * age), 1 / 1.05, 1 / (1 + DAMPED * 0.1 * age + SLOWED * (age - 1))]
        )
        assert prediction.exposed_seconds[1, 0] < 1e-2 < prediction.exposed_seconds[0, 0]
    assert prediction.step_seconds[0, 0] > 1.3 * prediction.step_seconds[1, 0]


def test_measured_codec_rates_count(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    rates = {"fp16": 1e9, "int8": 4e8, "topk": 1e8, "powersgd": 5e8}
    plain = cluster_of("a", "b")
    devices = [
        dataclasses.replace(device, profile=dataclasses.replace(device.profile, codec_rates=measured))
        for device, measured in zip(
            plain.devices, (rates, {name: 2 * rate for name, rate in rates.items()}), strict=True
        )
    ]
    changes: tuple[Settings, ...] = (
        {},
        {"compress.codec": "fp16"},
        {"compress.codec": "int8"},
        {"compress.codec": "topk", "compress.error_feedback": False},
        {"compress.codec": "powersgd", "compress.rank": 8, "compress.error_feedback": False},
        {"compress.codec": "sign", "compress.error_feedback": False},
    )
    facts = demand(workload, dataclasses.replace(plain, devices=tuple(devices)), [space.strategy(s) for s in changes])
    none, fp16, int8, topk, powersgd, sign = facts.codec_seconds
    assert none == 0
    # The slower device counts. Half of the time goes into encoding.
    assert fp16 == pytest.approx(GRADIENT / 1e9)
    # One encoding; what others sent, their sums and, for the feedback, the own payload are decoded.
    assert int8 == pytest.approx((1 + 3) / 2 * GRADIENT / 4e8 + FEEDBACK_PASSES * GRADIENT / 1e10)
    assert topk == pytest.approx(GRADIENT / 1e8 + 2 * SCATTER_PASSES * 4e5 / 1e10)
    # Twice the default rank; what is left over is no matrix.
    assert powersgd == pytest.approx(2 * GRADIENT / 5e8, rel=0.1)
    assert sign == pytest.approx(3 / 2 * PRIORS["sign"].passes * GRADIENT / 1e10)


def test_what_codecs_lose(facts_of: Callable[..., Demand]) -> None:
    names = ("none", "bf16", "int8", "fp8", "sign", "topk", "powersgd", "randomk")
    losses = facts_of(*({"compress.codec": name} for name in names)).information_loss
    assert set(names) <= set(PRIORS)
    assert losses[0] == 0
    assert (np.diff(losses[:5]) > 0).all()
    # At a twentieth of the elements, or a fortieth for lack of better.
    assert losses[5] == pytest.approx(np.log10(20))
    assert losses[7] == pytest.approx(2 * losses[5])
    for name in names[2:]:
        with_feedback, without = facts_of(
            {"compress.codec": name}, {"compress.codec": name, "compress.error_feedback": False}
        ).information_loss
        assert without > 2 * with_feedback


def test_codecs_have_a_prior() -> None:
    assert set(CODECS.names()) == set(PRIORS)


@pytest.mark.parametrize("parameters", [1, 7, 2**53])
@pytest.mark.parametrize("tensors", [1, 1000, 2**53])
def test_absurd_workloads_cost_no_memory_and_have_figures(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf, parameters: int, tensors: int
) -> None:
    profile = dataclasses.replace(workload, parameters=parameters, parameter_tensors=tensors)
    strategies = [space.strategy({"compress.codec": codec}) for codec in ("randomk", "powersgd")]
    sent = demand(profile, cluster_of("a", "b"), strategies).wire_bytes
    assert np.isfinite(sent).all()
    assert (sent.sum(axis=1) > 0).all()
