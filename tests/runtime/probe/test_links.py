"""Links and tiers are measured in few runs, and come out as the network has them."""

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from paceline.runtime.domain.cluster import Link, Tier
from paceline.runtime.probe.links import measure_links
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


def test_a_slow_link_is_its_nodes_own() -> None:
    nodes = ("n0", "n1", "slow", "n2", "n3")
    network = racked({"core": nodes}, {**dict.fromkeys(nodes, 400.0), "slow": 50.0})
    links, tiers = measured(network)
    assert [tier.name for tier in tiers] == ["node"]
    assert by_node(network, tiers[0]) == {frozenset([node]): 50.0 if node == "slow" else 400.0 for node in nodes}
    for ends, link in links.items():
        assert link.alone == link.bandwidth == (50.0 if "slow" in ends else 400.0)
    assert len(network.runs) == 5


def test_devices_of_a_node_are_measured_inside_it() -> None:
    rates = {"a": 40.0, "b": 80.0}
    network = TreeNetwork(homes=("a", "b", "a", "b", "b"), racks={"a": "r", "b": "r"}, up=rates, down=rates)
    links, tiers = measured(network)
    assert [(tier.name, tier.groups, tier.uplinks) for tier in tiers] == [("node", ((0, 2), (1, 3, 4)), (40.0, 40.0))]
    assert {ends: link.bandwidth for ends, link in links.items()} == {
        ("a", "a"): INSIDE,
        ("b", "b"): INSIDE,
        ("a", "b"): 40.0,
        ("b", "a"): 40.0,
    }


def test_a_single_device_has_no_links() -> None:
    network = TreeNetwork(homes=("a",), racks={"a": "r"}, up={}, down={})
    assert measured(network) == ({}, ())
    assert network.runs == []
