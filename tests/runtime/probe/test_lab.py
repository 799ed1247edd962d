"""A probe of a real network finds its racks, whatever its nodes are called and in whatever order they come."""

import random
from pathlib import Path

import pytest
import yaml

from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.lab.file import find
from tests.runtime.lab.support import inventory, needs_root, write

MBIT = 1e6 / 8


@needs_root
@pytest.mark.slow
def test_racks_and_their_uplinks_are_found_under_shuffled_names(tmp_path: Path) -> None:
    lab = yaml.safe_load(find("two-racks").read_text())
    generator = random.Random(3)
    generator.shuffle(lab["nodes"])
    names = generator.sample([f"node{index}" for index in range(8)], 8)
    for node, name in zip(lab["nodes"], names, strict=True):
        node["name"] = name
    racks = {frozenset(node["name"] for node in lab["nodes"] if node["rack"] == rack["name"]) for rack in lab["racks"]}
    before = inventory()
    with EmbeddedRuntime(f"lab:{write(tmp_path, yaml.safe_dump(lab))}") as runtime:
        cluster = runtime.describe_cluster()
    assert inventory() == before
    assert [tier.name for tier in cluster.tiers] == ["node", "rack"]
    nodes, found = cluster.tiers
    assert {frozenset(cluster.devices[index].node for index in group) for group in found.groups} == racks
    assert found.uplinks == (pytest.approx(100 * MBIT, rel=0.15),) * 2
    assert len(nodes.groups) == 8
    rack_of = {cluster.devices[index].node: number for number, group in enumerate(found.groups) for index in group}
    for link in cluster.links:
        if rack_of[link.source] != rack_of[link.target]:
            assert link.alone == pytest.approx(100 * MBIT, rel=0.15)
            assert link.bandwidth < link.alone
