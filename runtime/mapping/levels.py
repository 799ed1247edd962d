"""The tiers of a cluster as the ranks see them: who sits with whom, and how fast traffic between them goes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import parse_integers
from paceline.runtime.errors import InvalidRequest

OUTERMOST = "cluster"
"""Name of the traffic between ranks that no group holds together."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """A partition of the ranks."""

    name: str
    """Name of the tier."""
    groups: tuple[int, ...]
    """Group of each rank, by rank; any numbers, equal ones mean the same group."""


def tier_levels(cluster: Cluster, order: Sequence[int]) -> tuple[Level, ...]:
    """The cluster's tiers, innermost first, for ranks on the devices of `order`."""
    return tuple(
        Level(name=tier.name, groups=tuple(tier.group_of(device) for device in order)) for tier in cluster.tiers
    )


def grouping(groups: str, tiers: Sequence[Level]) -> Sequence[Level]:
    """Resolve `mapping.groups`: the levels that hierarchical exchanges follow, innermost first."""
    return tiers if groups == "tiers" else (Level(name="group", groups=parse_integers(groups)),)


def traffic_between(tiers: Sequence[Level], rank: int, other: int) -> str:
    """Name of the traffic between two ranks: the innermost tier that holds both in one group."""
    for level in tiers:
        if level.groups[rank] == level.groups[other]:
            return level.name
    return OUTERMOST


def ring_rate(cluster: Cluster, order: Sequence[int]) -> float:
    """Rate at which every rank on the devices of `order` can send to the next, and the last to the first, B/s.

    It is that of the slowest hop: the hops that leave a group share its way out, and those that enter it its way in.
    Raises InvalidRequest where the cluster does not describe a link.
    """
    hops = list(zip(order, [*order[1:], order[0]], strict=True))
    between = Counter((cluster.devices[source].node, cluster.devices[target].node) for source, target in hops)
    rates = [_path_rate(cluster, source, target, flows) for (source, target), flows in between.items()]
    for tier in cluster.tiers:
        crossing = [(tier.group_of(source), tier.group_of(target)) for source, target in hops]
        leaving = Counter(source for source, target in crossing if source != target)
        entering = Counter(target for source, target in crossing if source != target)
        for group, uplink in enumerate(tier.uplinks):
            if flows := max(leaving[group], entering[group]):
                rates.append(uplink / flows)
    return min(rates)


def _path_rate(cluster: Cluster, source: str, target: str, flows: int) -> float:
    """Rate of each of so many hops between two nodes, or inside one, as far as these two decide it."""
    for link in cluster.links:
        if (link.source, link.target) == (source, target):
            if source == target:
                return link.bandwidth
            # Without measured tiers all that is known of a path's contention is the number of its own flows.
            return link.alone if cluster.tiers else link.bandwidth / flows
    raise InvalidRequest(f"cluster {cluster.name} describes no link {source}->{target}; probe it again")
