"""What limits a workload on a cluster, as the simulator sees it."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from paceline.env.forms import ring
from paceline.env.network import Network
from paceline.env.simulator import Unknowns, simulate
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.mapping import device_order

DRAWS = 1000
FREE = 1e9
"""Factor on all rates of a network that costs nothing."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where the time of a step goes, medians over what the simulator does not know, and what takes most of it."""

    workload: str
    """Its reference."""
    compute_seconds: float
    """Forward, backward and optimizer, mean over ranks, s."""
    waiting_seconds: float
    """Waiting for slower ranks, s."""
    network_seconds: float
    """What exchanges add to a step beyond what is hidden behind the backward pass, s."""
    busiest_tier: str | None
    """Tier with the link that an exchange keeps busy for longest; None where devices share a node."""
    network_per_flop: float
    """What the workload asks of the network, B/FLOP, to be compared with the cluster's balance."""
    limit: str
    """The largest of the three: `compute`, `waiting` or `network`."""

    @property
    def sentence(self) -> str:
        """All of it in one sentence."""
        where = f", most of all at the {self.busiest_tier}s' ways out" if self.busiest_tier else ""
        limits = {
            "compute": "compute limits it",
            "waiting": "slow devices limit it",
            "network": f"the network limits it{where}",
        }
        return (
            f"{self.workload} under the default strategy: a step computes for {self.compute_seconds:.3g} s, waits "
            f"{self.waiting_seconds:.3g} s for slower ranks and {self.network_seconds:.3g} s for the network, so "
            f"{limits[self.limit]}."
        )


def find_limits(workload: WorkloadProfile, cluster: Cluster, strategy: Strategy) -> Limits:
    """Simulate the strategy on the cluster, and on one with a network that costs nothing.

    Raises IllegalStrategy or InvalidRequest as `simulate` does.
    """
    unknowns = Unknowns.sample(np.random.default_rng(0), DRAWS)
    real = simulate(workload, cluster, [strategy], unknowns)
    free = simulate(workload, _with_free_network(cluster), [strategy], unknowns)
    seconds = {
        "compute": float(np.median(free.compute_seconds)),
        "waiting": float(np.median(free.exposed_seconds)),
        "network": float(np.median(real.step_seconds - free.step_seconds)),
    }
    return Limits(
        workload=workload.name,
        compute_seconds=seconds["compute"],
        waiting_seconds=seconds["waiting"],
        network_seconds=seconds["network"],
        busiest_tier=_busiest_tier(cluster, strategy),
        network_per_flop=float(real.demand.wire_bytes.sum()) / (workload.flops_per_sample * workload.global_batch),
        limit=max(seconds, key=seconds.__getitem__),
    )


def _with_free_network(cluster: Cluster) -> Cluster:
    return dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(device, profile=dataclasses.replace(device.profile, net_latency=0.0))
            for device in cluster.devices
        ),
        links=tuple(
            dataclasses.replace(link, bandwidth=link.bandwidth * FREE, alone=link.alone * FREE, latency=0.0)
            for link in cluster.links
        ),
        tiers=tuple(
            dataclasses.replace(tier, uplinks=tuple(rate * FREE for rate in tier.uplinks)) for tier in cluster.tiers
        ),
    )


def _busiest_tier(cluster: Cluster, strategy: Strategy) -> str | None:
    order = device_order(strategy, cluster, cluster.size)
    busy = np.sum(Network(cluster).route(order, ring(cluster.size)).busy, axis=0)
    tiers = [tier.name for tier in cluster.tiers for _ in tier.groups]
    return tiers[int(np.argmax(busy))] if tiers else None
