from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import IllegalStrategy, InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.runtime.mapping import (
    MAPPERS,
    SHARES,
    batch_shares,
    device_order,
    grouping,
    ring_rate,
    tier_levels,
    traffic_between,
)


def cluster_of(size: int) -> Cluster:
    profile = DeviceProfile(flops=1e9, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9)
    devices = (Device(name=f"d{i}", node="n", kind="cpu", profile=profile) for i in range(size))
    return Cluster(name=f"test:{size}", devices=tuple(devices), links=())


def shares(weights: Sequence[int], global_batch: int) -> tuple[int, ...]:
    size = len(weights)
    strategy = Strategy.of({"mapping.batch_share": ",".join(map(str, weights))})
    return batch_shares(strategy, cluster_of(size), range(size), global_batch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 400))
def test_shares_keep_every_sample_and_stay_within_one_of_the_exact_share(weights: list[int], extra: int) -> None:
    global_batch = sum(weights) + extra
    result = shares(weights, global_batch)
    assert sum(result) == global_batch
    for share, weight in zip(result, weights, strict=True):
        exact = global_batch * weight / sum(weights)
        assert floor(exact) <= share <= ceil(exact)


def test_remainders_go_to_the_largest_fraction_and_on_a_tie_to_the_lower_rank() -> None:
    assert shares([5, 3, 2], 11) == (6, 3, 2)
    assert shares([1, 1, 1], 8) == (3, 3, 2)
    assert shares([1, 2, 4], 10) == (1, 3, 6)


def test_even_shares_of_a_batch_that_does_not_divide() -> None:
    strategy = knob_space().strategy({})
    assert batch_shares(strategy, cluster_of(4), range(4), 30) == (8, 8, 7, 7)


def test_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(IllegalStrategy, match="world size 4 is larger than the global batch of 3; use at most 3"):
        shares([1, 1, 1, 1], 3)


def test_a_rank_without_a_sample_is_refused() -> None:
    with pytest.raises(IllegalStrategy, match="leaves rank 1 without a sample"):
        shares([99, 1], 10)


@given(st.permutations(range(5)))
def test_an_explicit_order_is_taken_as_it_is(order: list[int]) -> None:
    settings = {"mapping.order": ",".join(map(str, order))}
    strategy = knob_space().strategy(settings, world_size=5)
    assert device_order(strategy, cluster_of(5), 5) == tuple(order)


@pytest.mark.parametrize("name", MAPPERS.names())
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_mapper_gives_each_rank_its_own_device(name: str, world_size: int) -> None:
    order = device_order(Strategy.of({"mapping.order": name}), cluster_of(4), world_size)
    assert len(set(order)) == world_size
    assert set(order) <= set(range(4))


@pytest.mark.parametrize("name", SHARES.names())
def test_every_batch_share_weighs_each_rank(name: str) -> None:
    weights = SHARES.get(name)().weights(cluster_of(4), (2, 0, 1))
    assert len(weights) == 3
    assert min(weights) > 0


def test_the_slowest_device_still_gets_a_sample() -> None:
    """A rule is asked anew while a job runs, which a refusal would end."""
    profile = DeviceProfile(flops=1e9, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9)
    devices = tuple(
        Device(name=f"d{i}", node="n", kind="cpu", profile=replace(profile, flops=flops))
        for i, flops in enumerate((1e9, 1e6, 1e9, 1e6))
    )
    cluster = Cluster(name="stragglers", devices=devices, links=())
    strategy = Strategy.of({"mapping.batch_share": "proportional"})
    assert batch_shares(strategy, cluster, range(4), 16) == (7, 1, 7, 1)
    assert batch_shares(strategy, cluster, range(4), 4) == (1, 1, 1, 1)


def tree(racks: Sequence[Sequence[int]], *, order: Sequence[int] | None = None, uplink: float = 100.0) -> Cluster:
    """Racks of nodes of so many devices; devices numbered in `order` of their place."""
    places = [
        (rack, node) for rack, nodes in enumerate(racks) for node, count in enumerate(nodes) for _ in range(count)
    ]
    places = [places[index] for index in order or range(len(places))]
    profile = DeviceProfile(flops=1e9, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9)
    names = [f"r{rack}n{node}" for rack, node in places]
    devices = tuple(Device(name=f"{name}d{i}", node=name, kind="cpu", profile=profile) for i, name in enumerate(names))
    nodes = list(dict.fromkeys(names))
    links = [
        Link(source=a, target=b, bandwidth=500.0 if a == b else 50.0, alone=400.0, latency=0.0)
        for a in nodes
        for b in nodes
    ]

    def tier(name: str, labels: Sequence[object], rate: float) -> Tier:
        groups = tuple(tuple(i for i, each in enumerate(labels) if each == label) for label in dict.fromkeys(labels))
        return Tier(name=name, groups=groups, uplinks=(rate,) * len(groups))

    tiers = [tier("node", names, 400.0), tier("rack", [rack for rack, _ in places], uplink)]
    return Cluster(
        name="tree", devices=devices, links=tuple(links), tiers=tuple(each for each in tiers if len(each.groups) > 1)
    )


def crossings(cluster: Cluster, order: Sequence[int]) -> list[int]:
    """Hops of the ring that leave a group, by tier."""
    hops = list(zip(order, [*order[1:], order[0]], strict=True))
    return [sum(tier.group_of(a) != tier.group_of(b) for a, b in hops) for tier in cluster.tiers]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4), st.randoms())
def test_topology_order_leaves_every_group_once(racks: list[list[int]], shuffle: Random) -> None:
    size = sum(map(sum, racks))
    order = list(range(size))
    shuffle.shuffle(order)
    cluster = tree(racks, order=order)
    ranks = MAPPERS.get("topology")().order(cluster, size)
    assert sorted(ranks) == list(range(size))
    groups = [len(tier.groups) for tier in cluster.tiers]
    assert crossings(cluster, ranks) == groups
    assert ring_rate(cluster, ranks) >= ring_rate(cluster, range(size))


def test_a_ring_shares_the_way_out_of_a_rack() -> None:
    racks = tree([[1, 1, 1, 1], [1, 1, 1, 1]])
    assert ring_rate(racks, range(8)) == 100.0
    assert ring_rate(racks, [0, 4, 1, 5, 2, 6, 3, 7]) == 100.0 / 4
    assert ring_rate(tree([[4], [4]], uplink=1000.0), range(8)) == 400.0
    assert ring_rate(tree([[4]]), range(4)) == 500.0


def test_a_cluster_without_tiers_is_judged_by_its_pairs_of_nodes() -> None:
    known = tree([[2, 2]])
    flat = Cluster(name="old", devices=known.devices, links=known.links)
    assert ring_rate(flat, [0, 2, 1, 3]) == 50.0 / 2
    with pytest.raises(InvalidRequest, match="describes no link r0n0->r0n0; probe it again"):
        ring_rate(Cluster(name="bare", devices=known.devices, links=()), range(4))


def test_ranks_see_the_tiers_of_their_devices() -> None:
    racks = tree([[1, 1], [2]], order=[3, 0, 2, 1])
    node, rack = tier_levels(racks, (1, 0, 2, 3))
    assert (node.name, rack.name) == ("node", "rack")
    assert [traffic_between((node, rack), 0, other) for other in range(4)] == ["node", "cluster", "cluster", "rack"]
    assert traffic_between((node, rack), 1, 2) == "node"
    assert grouping("tiers", (node, rack)) == (node, rack)
    (explicit,) = grouping("1,2,2,1", (node, rack))
    assert explicit.groups == (1, 2, 2, 1)


def test_proportional_shares_follow_the_measured_speed() -> None:
    profile = DeviceProfile(flops=1e9, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9)
    devices = tuple(
        Device(name=f"d{i}", node="n", kind="cpu", profile=replace(profile, flops=flops))
        for i, flops in enumerate((4e9, 1e9, 2e9, 1e9))
    )
    cluster = Cluster(name="mixed", devices=devices, links=())
    strategy = Strategy.of({"mapping.batch_share": "proportional"})
    assert batch_shares(strategy, cluster, (1, 0, 2, 3), 16) == (2, 8, 4, 2)
