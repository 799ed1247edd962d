"""What a mapper and a batch share are, and how their knobs are resolved for a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import parse_integers
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.registry import Registry


class Mapper(ABC):
    """Decides which device each rank runs on."""

    name: ClassVar[str]

    @abstractmethod
    def order(self, cluster: Cluster, world_size: int) -> tuple[int, ...]:
        """Device index by rank; `world_size` distinct indices."""


class BatchShare(ABC):
    """Decides how the samples of a global batch are shared among ranks."""

    name: ClassVar[str]
    follows_speed: ClassVar[bool] = False
    """Whether shares are planned anew when the devices' speeds move while a trial runs."""

    @abstractmethod
    def weights(self, cluster: Cluster, order: Sequence[int]) -> tuple[float, ...]:
        """Positive weight by rank, for ranks on the devices of `order`."""


MAPPERS: Registry[type[Mapper]] = Registry(
    "mapper", package="paceline.runtime.mapping", entry_point_group="paceline.mappers"
)
SHARES: Registry[type[BatchShare]] = Registry(
    "batch share", package="paceline.runtime.mapping", entry_point_group="paceline.batch_shares"
)


def device_order(strategy: Strategy, cluster: Cluster, world_size: int) -> tuple[int, ...]:
    """Resolve `mapping.order`: the device index of each rank."""
    value = str(strategy["mapping.order"])
    if value in MAPPERS.names():
        return MAPPERS.get(value)().order(cluster, world_size)
    return parse_integers(value)


def batch_shares(strategy: Strategy, cluster: Cluster, order: Sequence[int], global_batch: int) -> tuple[int, ...]:
    """Resolve `mapping.batch_share`: the samples of each rank, summing to the global batch, each at least 1.

    Weights are rounded by largest remainder (Hamilton's method), lower rank first on a tie, so a batch that does not
    divide is shared as evenly as possible and no sample is dropped. A rule gives the slowest rank one sample at least,
    as it may be asked again while a job runs. Raises IllegalStrategy when there are fewer samples than ranks, or when
    an explicit weight is too small for one sample.
    """
    if global_batch < len(order):
        raise IllegalStrategy(
            f"world size {len(order)} is larger than the global batch of {global_batch}; "
            f"use at most {global_batch} ranks"
        )
    value = str(strategy["mapping.batch_share"])
    if value in SHARES.names():
        return round_shares(SHARES.get(value)().weights(cluster, order), global_batch, at_least=1)
    shares = round_shares(parse_integers(value), global_batch)
    if min(shares) < 1:
        raise IllegalStrategy(
            f"mapping.batch_share={value} leaves rank {shares.index(0)} without a sample of a global batch of "
            f"{global_batch}; give it a larger weight"
        )
    return shares


def round_shares(weights: Sequence[float], total: int, *, at_least: int = 0) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights that sum to the total, by largest remainder.

    Those below `at_least` are raised to it at the expense of the largest; needs a total that suffices.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: total - sum(shares)]:
        shares[rank] += 1
    while min(shares) < at_least:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(min(shares))] += 1
    return tuple(shares)
