"""The order that crosses slow links least."""

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.mapping.base import MAPPERS, Mapper


@MAPPERS.register
class Topology(Mapper):
    """Devices of one rack follow each other, and in it devices of one node.

    A ring in this order leaves and enters each group of each tier once, the least that a ring can: it has to visit
    them all. Groups and devices keep the scheduler's order otherwise.
    """

    name = "topology"

    def order(self, cluster: Cluster, world_size: int) -> tuple[int, ...]:
        """The first `world_size` devices, sorted by their groups from the outermost tier inwards."""
        devices = range(world_size)

        def path(device: int) -> tuple[int, ...]:
            # A group is as early as its first device.
            return tuple(tier.groups[tier.group_of(device)][0] for tier in reversed(cluster.tiers))

        return tuple(sorted(devices, key=lambda device: (*path(device), device)))
