"""What devices can move per unit of compute."""

import dataclasses

import pytest

from paceline.runtime.probe.balance import Balance, cluster_balance, device_balance
from tests.runtime.probe.simulated import two_racks


def test_network_is_the_narrowest_way_out_shared_by_all_behind_it() -> None:
    cluster = two_racks(flops=(1e10, 1e10, 2e10, 4e10))
    # Half of a rack's 12.5 MB/s is less than a node's 50 MB/s.
    assert device_balance(cluster, 0) == Balance(memory=0.4, network=6.25e6 / 1e10)
    assert device_balance(cluster, 3) == Balance(memory=0.1, network=6.25e6 / 4e10)
    assert cluster_balance(cluster) == Balance(memory=pytest.approx(0.2), network=pytest.approx(25e6 / 8e10))
    wide = two_racks(uplink=1e9)
    assert device_balance(wide, 0).network == 50e6 / 1e10


def test_the_slowest_way_out_is_everybodys() -> None:
    cluster = two_racks()
    nodes, racks = cluster.tiers
    uneven = dataclasses.replace(cluster, tiers=(nodes, dataclasses.replace(racks, uplinks=(2e6, 12.5e6))))
    assert device_balance(uneven, 1).network == 6.25e6 / 1e10
    assert cluster_balance(uneven).network == pytest.approx(1e6 / 1e10)


def test_without_tiers_it_is_the_rate_inside_the_node() -> None:
    cluster = two_racks()
    inside = dataclasses.replace(cluster.links[0], source="e0", target="e0")
    pair = tuple(dataclasses.replace(device, node="e0") for device in cluster.devices[:2])
    node = dataclasses.replace(cluster, devices=pair, links=(inside,), tiers=())
    assert cluster_balance(node).network == pytest.approx(6.25e6 / 1e10)
    single = dataclasses.replace(cluster, devices=pair[:1], links=(), tiers=())
    assert cluster_balance(single) == Balance(memory=0.4, network=0.0)
