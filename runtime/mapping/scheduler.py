"""The order in which the launcher numbered the devices."""

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.mapping.base import MAPPERS, Mapper


@MAPPERS.register
class Scheduler(Mapper):
    """Rank r runs on device r, as schedulers do."""

    name = "scheduler"

    def order(self, cluster: Cluster, world_size: int) -> tuple[int, ...]:
        """0, 1, 2, ..."""
        return tuple(range(world_size))
