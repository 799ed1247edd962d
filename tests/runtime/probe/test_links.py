"""Links and tiers are measured in few runs, and come out as the network has them."""

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.domain.cluster import Link, Tier
from paceline.runtime.probe.links import FlowRate, measure_links
from paceline.runtime.probe.rounds import Pair
from tests.runtime.probe.simulated import INSIDE, LATENCY, TreeNetwork


def measured(network: TreeNetwork) -> tuple[dict[tuple[str, str], Link], tuple[Tier, ...]]:
    nodes: dict[str, list[int]] = {}
    for device, node in enumerate(network.homes):
        nodes.setdefault(node, []).append(device)
    links, tiers = asyncio.run(measure_links(nodes, network.run))
    return {(link.source, link.target): link for link in links}, tiers


def racked(racks: Mapping[str, Sequence[str]], rates: Mapping[str, float | tuple[float, float]]) -> TreeNetwork:
    """Nodes with a device each, in any order; rates by node or rack, in both directions or as (up, down)."""
    both = {name: rate if isinstance(rate, tuple) else (rate, rate) for name, rate in rates.items()}
    homes = [node for nodes in racks.values() for node in nodes]
    return TreeNetwork(
        homes=random.Random(7).sample(homes, len(homes)),
        racks={node: rack for rack, nodes in racks.items() for node in nodes},
        up={name: up for name, (up, _) in both.items()},
        down={name: down for name, (_, down) in both.items()},
    )


def by_node(network: TreeNetwork, tier: Tier) -> dict[frozenset[str], float]:
    """Uplinks of a tier by the nodes of its groups."""
    return {
        frozenset(network.homes[device] for device in group): uplink
        for group, uplink in zip(tier.groups, tier.uplinks, strict=True)
    }


EAST, WEST = ("e0", "e1", "e2", "e3"), ("w0", "w1", "w2", "w3")


def test_two_racks() -> None:
    network = racked({"east": EAST, "west": WEST}, {**dict.fromkeys(EAST + WEST, 400.0), "east": 100.0, "west": 100.0})
    links, tiers = measured(network)
    assert [tier.name for tier in tiers] == ["node", "rack"]
    assert by_node(network, tiers[0]) == {frozenset([node]): 400.0 for node in EAST + WEST}
    assert by_node(network, tiers[1]) == {frozenset(EAST): 100.0, frozenset(WEST): 100.0}
    assert len(links) == 8 * 7
    for (source, target), link in links.items():
        assert link.latency == LATENCY
        if source[0] == target[0]:
            assert (link.alone, link.bandwidth) == (400.0, 400.0)
        else:
            assert link.alone == 100.0
            assert 25.0 <= link.bandwidth <= 50.0
    # A tournament of eight, everybody to the other rack, and a pair of the two racks alone.
    assert [len(flows) for flows in network.runs] == [8] * 7 + [8, 2]


def test_unequal_racks_with_slower_ways_up() -> None:
    racks = {"a": ("a0", "a1"), "b": ("b0", "b1", "b2"), "c": ("c0", "c1", "c2")}
    nodes = [node for each in racks.values() for node in each]
    rates = {**dict.fromkeys(nodes, 200.0), "a": (20.0, 40.0), "b": (30.0, 60.0), "c": (30.0, 80.0)}
    network = racked(racks, rates)
    links, tiers = measured(network)
    assert by_node(network, tiers[1]) == {
        frozenset(racks["a"]): pytest.approx(20.0),
        frozenset(racks["b"]): pytest.approx(30.0),
        frozenset(racks["c"]): pytest.approx(30.0),
    }
    assert links["a0", "c2"].alone == pytest.approx(20.0)
    assert links["c0", "b1"].alone == pytest.approx(30.0)
    assert links["b0", "b2"].alone == links["b0", "b2"].bandwidth == 200.0
    assert all(link.bandwidth <= link.alone for link in links.values())


@given(st.permutations(EAST + WEST), st.floats(30.0, 90.0))
def test_a_node_slower_than_its_racks_way_out_stays_in_its_rack(order: list[str], slow: float) -> None:
    rates = {**dict.fromkeys(EAST + WEST, 400.0), "east": 100.0, "west": 100.0, "e0": slow}
    network = racked({"east": EAST, "west": WEST}, rates)
    network.homes = order
    links, tiers = measured(network)
    assert set(by_node(network, tiers[1])) == {frozenset(EAST), frozenset(WEST)}
    crossing = [links[ends].alone for node in WEST for ends in (("e0", node), (node, "e0"))]
    assert crossing == pytest.approx([slow] * 8)
    assert links["e1", "w0"].alone == pytest.approx(100.0)


def test_a_pair_reaches_as_much_alone_as_among_others_even_if_its_bad_moment_was_alone() -> None:
    network = racked({"east": EAST, "west": WEST}, {**dict.fromkeys(EAST + WEST, 400.0), "east": 100.0, "west": 100.0})
    undisturbed = network.run

    async def run(flows: Sequence[Pair]) -> Mapping[Pair, FlowRate]:
        rates = await undisturbed(flows)
        alone = len(flows) == 2
        return {flow: FlowRate(bandwidth=10.0, latency=LATENCY) for flow in flows} if alone else rates

    links, _ = asyncio.run(measure_links({node: [index] for index, node in enumerate(network.homes)}, run))
    assert min(link.bandwidth for link in links) > 10.0
    assert all(link.bandwidth <= link.alone for link in links)


def test_a_slow_link_is_its_nodes_own() -> None:
    nodes = ("n0", "n1", "slow", "n2", "n3")
    network = racked({"core": nodes}, {**dict.fromkeys(nodes, 400.0), "slow": 50.0})
    links, tiers = measured(network)
    assert [tier.name for tier in tiers] == ["node"]
    assert by_node(network, tiers[0]) == {frozenset([node]): 50.0 if node == "slow" else 400.0 for node in nodes}
    for ends, link in links.items():
        assert link.alone == link.bandwidth == (50.0 if "slow" in ends else 400.0)
    assert len(network.runs) == 5


def test_devices_of_a_node_share_its_way_out() -> None:
    rates = {"a": 40.0, "b": 80.0, "c": 80.0}
    network = TreeNetwork(homes=("a", "b", "a", "b", "b", "c"), racks=dict.fromkeys(rates, "r"), up=rates, down=rates)
    links, tiers = measured(network)
    assert [(tier.name, tier.groups) for tier in tiers] == [("node", ((0, 2), (1, 3, 4), (5,)))]
    assert tiers[0].uplinks == pytest.approx((40.0, 80.0, 80.0))
    assert {ends: link.bandwidth for ends, link in links.items()} == {
        ("a", "a"): INSIDE,
        ("b", "b"): INSIDE,
        **dict.fromkeys([("a", "b"), ("b", "a")], pytest.approx(40.0 / 3)),
        **dict.fromkeys([("a", "c"), ("c", "a")], pytest.approx(40.0 / 2)),
        **dict.fromkeys([("b", "c"), ("c", "b")], pytest.approx(80.0 / 3)),
    }
    assert links["a", "b"].alone == pytest.approx(40.0)
    assert links["b", "c"].alone == pytest.approx(80.0)


def test_a_device_too_slow_for_its_nodes_link_is_not_taken_for_the_link() -> None:
    # Two devices that send 30 each fill a link of 60, and one of them alone does not.
    nodes = ("n0", "n1", "n2")
    rates = dict.fromkeys(nodes, 60.0)
    network = TreeNetwork(homes=nodes * 2, racks=dict.fromkeys(nodes, "r"), up=rates, down=rates, sender=30.0)
    links, tiers = measured(network)
    assert tiers[0].uplinks == (60.0,) * 3
    assert {link.bandwidth for ends, link in links.items() if ends[0] != ends[1]} == {30.0}


def test_a_single_device_has_no_links() -> None:
    network = TreeNetwork(homes=("a",), racks={"a": "r"}, up={}, down={})
    assert measured(network) == ({}, ())
    assert network.runs == []
