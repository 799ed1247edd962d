"""Batch shares by speed."""

from collections.abc import Sequence

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.mapping.base import SHARES, BatchShare


@SHARES.register
class Proportional(BatchShare):
    """Every rank gets samples in proportion to its device's measured speed, so that all are done at the same time.

    The runtime plans the shares anew when the devices' speeds move while a trial runs.
    """

    name = "proportional"
    follows_speed = True

    def weights(self, cluster: Cluster, order: Sequence[int]) -> tuple[float, ...]:
        """FLOP/s of each rank's device."""
        return tuple(cluster.devices[device].profile.flops for device in order)
