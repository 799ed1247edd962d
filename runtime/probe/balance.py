"""How much a cluster can move per unit of compute."""

from dataclasses import dataclass

from paceline.runtime.domain.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Rates of a device or of a whole cluster, relative to its compute."""

    memory: float
    """Memory traffic per FLOP, B/FLOP."""
    network: float
    """Traffic to other devices per FLOP, with all devices exchanging at once, B/FLOP; 0 for a single device."""


def device_balance(cluster: Cluster, device: int) -> Balance:
    """The balance of one device of a cluster."""
    profile = cluster.devices[device].profile
    return Balance(memory=profile.mem_bw / profile.flops, network=_way_out(cluster, device) / profile.flops)


def cluster_balance(cluster: Cluster) -> Balance:
    """The balance of all devices together. Each can send no more than the slowest of them on its way out."""
    flops = sum(device.profile.flops for device in cluster.devices)
    memory = sum(device.profile.mem_bw for device in cluster.devices)
    # Exchanges go around all devices, so the slowest way out is everybody's.
    network = cluster.size * min(_way_out(cluster, device) for device in range(cluster.size))
    return Balance(memory=memory / flops, network=network / flops)


def _way_out(cluster: Cluster, device: int) -> float:
    """A device's part of the narrowest of its groups' ways out, or without groups its rate inside the node, B/s."""
    shares = []
    for tier in cluster.tiers:
        index = tier.group_of(device)
        shares.append(tier.uplinks[index] / len(tier.groups[index]))
    node = cluster.devices[device].node
    return min(
        shares or [link.bandwidth for link in cluster.links if (link.source, link.target) == (node, node)] or [0.0]
    )
