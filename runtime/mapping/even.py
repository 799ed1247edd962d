"""Equal batch shares."""

from collections.abc import Sequence

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.mapping.base import SHARES, BatchShare


@SHARES.register
class Even(BatchShare):
    """Every rank gets the same number of samples, up to the remainder of the division."""

    name = "even"

    def weights(self, cluster: Cluster, order: Sequence[int]) -> tuple[float, ...]:
        """1 for every rank."""
        return (1.0,) * len(order)
