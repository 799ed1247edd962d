"""What limits a workload is what takes most of a step."""

import dataclasses

import pytest

from paceline.runtime import workloads
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.knobs import knob_space
from paceline.tuner.limits import Limits, find_limits
from tests.runtime.probe.simulated import two_racks


def limits_on(cluster: Cluster) -> Limits:
    reference = "bytes-lm/small"
    return find_limits(workloads.create(reference).profile(reference), cluster, knob_space().default)


def test_slow_uplinks_make_the_network_the_limit() -> None:
    limits = limits_on(two_racks(uplink=1e6))
    assert (limits.limit, limits.busiest_tier) == ("network", "rack")
    assert limits.network_seconds > limits.compute_seconds > limits.waiting_seconds > 0
    assert limits.sentence.startswith("bytes-lm/small under the default strategy: a step computes for ")
    assert limits.sentence.endswith(" for the network, so the network limits it, most of all at the racks' ways out.")


def test_wide_uplinks_leave_the_nodes_own_links_busiest() -> None:
    assert limits_on(two_racks(uplink=1e9)).busiest_tier == "node"


def test_slow_devices_on_a_fast_network_make_compute_the_limit() -> None:
    limits = limits_on(two_racks(flops=(1e7,) * 4))
    assert limits.limit == "compute"
    assert limits.sentence.endswith("so compute limits it.")


def test_one_slow_device_makes_the_others_wait() -> None:
    limits = limits_on(two_racks(flops=(1e8, 1e8, 1e8, 1e7)))
    assert limits.limit == "waiting"
    assert limits.sentence.endswith("so slow devices limit it.")


def test_single_device_needs_no_network() -> None:
    cluster = two_racks()
    limits = limits_on(dataclasses.replace(cluster, devices=cluster.devices[:1], links=(), tiers=()))
    assert (limits.network_seconds, limits.network_per_flop, limits.busiest_tier) == (0.0, 0.0, None)
    assert limits.waiting_seconds == pytest.approx(0.0)
