"""Clusters, workloads and strategies for the tests of the environment."""

from collections.abc import Callable, Sequence

import pytest

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import knob_space


@pytest.fixture
def space() -> KnobSpace:
    """The knob space of this process."""
    return knob_space()


@pytest.fixture
def workload() -> WorkloadProfile:
    """A million parameters in ten tensors, 16 samples per step of a MFLOP each."""
    return WorkloadProfile(
        name="toy",
        doc="Round numbers.",
        global_batch=16,
        train_samples=1000,
        heldout_samples=100,
        parameters=1_000_000,
        parameter_tensors=10,
        flops_per_sample=1e6,
    )


ClusterOf = Callable[..., Cluster]


@pytest.fixture
def cluster_of() -> ClusterOf:
    """Build a cluster of CPU devices from their nodes: 1 GFLOP/s, 10 GB/s, 1 ms, 100 MB/s links.

    With `racks`, the nodes of each, it has tiers: nodes send at 50 MB/s and racks at 12.5 MB/s, unless said otherwise.
    """

    def build(
        *nodes: str,
        flops: tuple[float, ...] = (),
        bandwidth: float = 1e8,
        memory: float = 1e9,
        racks: tuple[str, ...] = (),
        node_rates: tuple[float, ...] = (),
        rack_rates: tuple[float, ...] = (),
    ) -> Cluster:
        speeds = flops or (1e9,) * len(nodes)
        devices = tuple(
            Device(
                name=f"{node}/cpu{index}",
                node=node,
                kind="cpu",
                profile=DeviceProfile(flops=speed, mem_bw=1e10, net_latency=1e-3, pcie_bw=0.0, memory=memory),
            )
            for index, (node, speed) in enumerate(zip(nodes, speeds, strict=True))
        )
        links = tuple(
            Link(source=source, target=target, bandwidth=bandwidth, alone=bandwidth, latency=1e-4)
            for source in sorted(set(nodes))
            for target in sorted(set(nodes))
        )
        tiers = (
            tier("node", sorted(set(nodes)), nodes, node_rates or (5e7,) * len(set(nodes))),
            tier("rack", racks, nodes, rack_rates or (1.25e7,) * len(racks)),
        )
        return Cluster(name="toy", devices=devices, links=links, tiers=tiers if racks else ())

    def tier(name: str, groups: Sequence[str], nodes: tuple[str, ...], rates: tuple[float, ...]) -> Tier:
        members = (tuple(index for index, node in enumerate(nodes) if node in group) for group in groups)
        return Tier(name=name, groups=tuple(members), uplinks=rates)

    return build
