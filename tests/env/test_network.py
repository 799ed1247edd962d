"""What exchanges cost on tiers: by hand, against the ring's rate, and against what the runtime's ranks send."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.env.demand import demand
from paceline.env.forms import nested
from paceline.env.network import Network
from paceline.env.simulator import simulate
from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.exchange.plan import make_plan
from paceline.runtime.knobs import knob_space
from paceline.runtime.mapping import ring_rate, tier_levels, traffic_between
from tests.env.simulated import ideal, scenario

ClusterOf = Callable[..., Cluster]

TWO_RACKS = ("ace", "bdf")


def exchange_seconds(cluster: Cluster, ring_bytes: float) -> float:
    """Time in which every rank on its own device sends that much to the next, with a message for each bucket."""
    latency = max(device.profile.net_latency for device in cluster.devices)
    return ring_bytes / ring_rate(cluster, range(cluster.size)) + latency


def test_without_tiers_flows_between_two_nodes_share_their_link(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cluster = cluster_of("a", "b", "a", "b")
    strategies = [space.strategy({"mapping.order": order}) for order in ("scheduler", "0,2,1,3")]
    facts = demand(workload, cluster, strategies)
    # Each rank sends 6 MB, and two of them the same way or not.
    assert facts.pipelined_seconds == pytest.approx([6e6 / 5e7 + 1e-3, 6e6 / 1e8 + 1e-3])
    assert facts.sequential_seconds == pytest.approx(facts.pipelined_seconds)
    assert facts.pipelined_seconds[0] == pytest.approx(exchange_seconds(cluster, 6e6))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), measured=st.booleans())
def test_a_flat_exchange_is_as_fast_as_the_ring(seed: int, measured: bool) -> None:
    workload, cluster, _, _ = scenario(seed)
    if not measured:
        cluster = dataclasses.replace(cluster, tiers=())
    # One bucket, so that the latency counts once.
    small = dataclasses.replace(workload, parameter_tensors=1)
    facts = demand(small, cluster, [knob_space().default])
    ring_bytes = 2 * (cluster.size - 1) / cluster.size * workload.gradient_bytes
    assert facts.pipelined_seconds[0] == pytest.approx(exchange_seconds(cluster, ring_bytes))


def test_hierarchical_exchange_by_hand(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    cluster = cluster_of(*"abcdef", racks=TWO_RACKS)
    changes = ({}, {"mapping.order": "topology"}, {"sync.mode": "hierarchical", "sync.chunk_mb": 1.0})
    facts = demand(workload, cluster, [space.strategy(change) for change in changes])
    ring_bytes = 2 * 5 / 6 * 4e6
    assert facts.pipelined_seconds[:2] == pytest.approx([3 * ring_bytes / 1.25e7 + 1e-3, ring_bytes / 1.25e7 + 1e-3])
    # In a rack each rank sends 2 x 2/3 of 4 MB, then 2 x 1/2 of its third to the other rack, in 4 chunks. Of the 5
    # rounds of a ring of 6 that their latency stands for, a level has as many as a rank has peers.
    inside, across = 4 / 3 * 4e6, 4e6 / 3
    latency = 4 * 1e-3 / 5
    assert facts.chunks[2] == 4
    assert facts.pipelined_seconds[2] == pytest.approx(3 * across / 1.25e7 + 2 * latency)
    assert facts.sequential_seconds[2] == pytest.approx(inside / 5e7 + 3 * across / 1.25e7 + 3 * latency)
    assert facts.tiers == ("node", "rack", "cluster")
    assert facts.wire_bytes[2] == pytest.approx([0, 6 * inside, 6 * across])
    assert facts.wire_bytes[:2] == pytest.approx(
        np.array([[0, 0, 6 * ring_bytes], [0, 4 * ring_bytes, 2 * ring_bytes]])
    )


def test_levels_share_the_uplinks_that_both_use(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cluster = cluster_of(*"abcdef", racks=TWO_RACKS, rack_rates=(1e9, 1e9))
    facts = demand(workload, cluster, [space.strategy({"sync.mode": "hierarchical", "sync.chunk_mb": 16.0})])
    assert facts.pipelined_seconds[0] == pytest.approx((4 / 3 + 1 / 3) * 4e6 / 5e7 + 2 * 1e-3 / 5)


def test_levels_work_at_once_on_all_but_the_first_chunk(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cluster, workload = cluster_of(*"abcdef", racks=TWO_RACKS), dataclasses.replace(workload, global_batch=18)
    strategies = [space.strategy({"sync.mode": "hierarchical", "sync.chunk_mb": size}) for size in (1.0, 16.0)]
    facts = demand(workload, cluster, strategies)
    exposed = {
        part: simulate(workload, cluster, strategies, ideal(pipelining=part)).exposed_seconds[:, 0]
        for part in (0.0, 1.0)
    }
    assert exposed[0.0] == pytest.approx(facts.sequential_seconds)
    saved = facts.sequential_seconds - facts.pipelined_seconds
    assert exposed[1.0] == pytest.approx(facts.sequential_seconds - [3 / 4 * saved[0], 0])


def test_a_codec_for_the_slow_tier_leaves_the_others_alone(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cluster = cluster_of(*"abcdef", racks=TWO_RACKS)
    codecs = ({}, {"compress.codec": "fp16"}, {"compress.codec": "fp16", "compress.tier": "slow"})
    strategies = [space.strategy({"sync.mode": "hierarchical"} | codec) for codec in codecs]
    facts = demand(workload, cluster, strategies)
    _, rack, outermost = facts.wire_bytes.T
    assert rack == pytest.approx(rack[0] * np.array([1, 0.5, 1]))
    assert outermost == pytest.approx(outermost[0] * np.array([1, 0.5, 0.5]))
    # Whole gradients and then thirds of them are cast, or thirds only.
    assert facts.codec_seconds[2] == pytest.approx(facts.codec_seconds[1] / 4)


def test_explicit_groups_cost_what_equal_tiers_do(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    cluster = cluster_of(*"abcdef", racks=TWO_RACKS)
    strategies = [
        space.strategy({"sync.mode": "hierarchical", "mapping.groups": groups})
        for groups in ("tiers", "1,2,1,2,1,2", "1,1,2,2,3,3")
    ]
    tiers, equal, across = demand(workload, cluster, strategies).pipelined_seconds
    assert equal == pytest.approx(tiers)
    assert across > tiers


@settings(deadline=None)
@given(data=st.data())
def test_bytes_are_those_of_the_plan(data: st.DataObject) -> None:
    """Against what the runtime's ranks send, also where groups are of unequal size."""
    workload, cluster, _, _ = scenario(data.draw(st.integers(0, 2**32 - 1)))
    assume(cluster.tiers)
    order = data.draw(st.permutations(range(cluster.size)))
    levels = tier_levels(cluster, order)
    named: Counter[str] = Counter()
    leaving = [[0.0] * len(tier.uplinks) for tier in cluster.tiers]
    for rank in range(cluster.size):
        plan = make_plan(levels, rank, cluster.size)
        for transfer in (transfer for stage in plan.stages for transfer in stage.sends):
            part = (transfer.stop - transfer.first) / plan.lanes
            named[traffic_between(levels, rank, transfer.peer)] += part * workload.gradient_bytes
            for level, counts in zip(levels, leaving, strict=True):
                counts[level.groups[rank]] += part * (level.groups[rank] != level.groups[transfer.peer])
    strategy = knob_space().strategy({"sync.mode": "hierarchical", "mapping.order": ",".join(map(str, order))})
    facts = demand(workload, cluster, [strategy])
    found = dict(zip(facts.tiers, facts.wire_bytes[0], strict=True))
    assert found == pytest.approx({tier: named[tier] for tier in facts.tiers})
    busy = Network(cluster).route(order, nested(tuple(level.groups for level in levels))).busy
    seconds = [
        count / rate
        for counts, tier in zip(leaving, cluster.tiers, strict=True)
        for count, rate in zip(counts, tier.uplinks, strict=True)
    ]
    assert busy.sum(axis=0) == pytest.approx(seconds)


@settings(deadline=None)
@given(data=st.data())
def test_topology_makes_the_numbering_of_devices_irrelevant(data: st.DataObject) -> None:
    racks, nodes, devices = (data.draw(st.integers(1, most)) for most in (3, 3, 2))
    size = racks * nodes * devices
    rates = st.floats(1e6, 1e9)
    homes = [index // devices for index in range(size)]
    node_rates = data.draw(st.lists(rates, min_size=racks * nodes, max_size=racks * nodes))
    rack_rates = data.draw(st.lists(rates, min_size=racks, max_size=racks))
    numbering = data.draw(st.permutations(range(size)))

    def numbered(new: Sequence[int]) -> Cluster:
        """The cluster whose device `new[i]` is the i-th in the order of nodes."""
        place = {number: index for index, number in enumerate(new)}
        old = [place[number] for number in range(size)]
        profile = DeviceProfile(flops=1e9, mem_bw=1e10, net_latency=1e-3, pcie_bw=0.0, memory=1e9)
        tiers = [("node", [homes[i] for i in old], node_rates), ("rack", [homes[i] // nodes for i in old], rack_rates)]
        return Cluster(
            name="numbered",
            devices=tuple(Device(name=f"d{i}", node=f"n{homes[i]}", kind="cpu", profile=profile) for i in old),
            links=tuple(
                Link(source=f"n{a}", target=f"n{b}", bandwidth=1e8, alone=1e8, latency=0.0)
                for a in range(racks * nodes)
                for b in range(racks * nodes)
            ),
            tiers=tuple(
                Tier(
                    name=name,
                    groups=tuple(
                        tuple(device for device, group in enumerate(of) if group == number)
                        for number in range(len(uplinks))
                    ),
                    uplinks=tuple(uplinks),
                )
                for name, of, uplinks in tiers
                if len(uplinks) > 1
            ),
        )

    workload, _, _, draws = scenario(0)
    changes = ({}, {"sync.mode": "local_sgd"}, {"sync.mode": "hierarchical"}, {"mapping.batch_share": "proportional"})
    strategies = [knob_space().strategy(change | {"mapping.order": "topology"}) for change in changes]
    even = dataclasses.replace(workload, global_batch=16 * size)
    first, second = (simulate(even, numbered(new), strategies, draws) for new in (range(size), numbering))
    np.testing.assert_allclose(first.goodput, second.goodput, rtol=1e-9)
    np.testing.assert_allclose(first.demand.wire_bytes, second.demand.wire_bytes, rtol=1e-9)


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), factor=st.floats(1.01, 1e3))
def test_a_slower_uplink_makes_nothing_faster(data: st.DataObject, seed: int, factor: float) -> None:
    workload, cluster, strategies, draws = scenario(seed)
    assume(cluster.tiers)
    tier = data.draw(st.sampled_from(range(len(cluster.tiers))))
    uplinks = list(cluster.tiers[tier].uplinks)
    uplinks[data.draw(st.sampled_from(range(len(uplinks))))] /= factor
    tiers = list(cluster.tiers)
    tiers[tier] = dataclasses.replace(tiers[tier], uplinks=tuple(uplinks))
    before = simulate(workload, cluster, strategies, draws)
    after = simulate(workload, dataclasses.replace(cluster, tiers=tuple(tiers)), strategies, draws)
    assert (after.step_seconds >= before.step_seconds * (1 - 1e-12)).all()
