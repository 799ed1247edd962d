"""What an exchange is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import Codec, Layout
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.mapping.levels import Level, traffic_between

PEER_TIMEOUT = timedelta(minutes=10)
"""How long to wait for a peer. A dead one is noticed at once by its closed connection, not by this. A message between
two ranks must be told so each time, as gloo else takes the time that its group was given to come about."""

RELEASE_SECONDS = 10.0
"""How long the threads of an exchange may take to end; longer only if a peer is frozen and nobody has cut the
connections."""


class Exchange(ABC):
    """Sums buckets over a process group, through a codec. Calls must come in the same order on all ranks."""

    def __init__(
        self,
        codec: Codec,
        group: dist.ProcessGroup,
        tiers: Sequence[Level],
        *,
        links: dist.ProcessGroup | None = None,
    ) -> None:
        """`tiers` are the tiers of the network, the innermost first: they name the bytes that are counted.

        `links` are the ranks of the group, under the same numbers, and whoever else takes part.
        """
        self.codec = codec
        self.tiers = tiers
        self._group: dist.ProcessGroup | None = group
        self._links: dist.ProcessGroup | None = links or group
        self.world_size = group.size()
        self.rank = group.rank()
        self._traffic = [traffic_between(tiers, self.rank, peer) for peer in range((links or group).size())]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that are summed over."""
        assert self._group is not None, "the exchange was released"
        return self._group

    @property
    def links(self) -> dist.ProcessGroup:
        """The same and whoever else takes part."""
        assert self._links is not None, "the exchange was released"
        return self._links

    @property
    def needs_layout(self) -> bool:
        """Whether `start` looks at the layout."""
        return False

    def release(self) -> None:
        """Let go of the group. An exchange that never ends keeps this object alive, and must not keep the group."""
        self._group = self._links = None

    def traffic_to(self, peer: int) -> str:
        """Name of the tier that carries bytes from this rank to a peer."""
        return self._traffic[peer]

    @property
    def traffic_to_next(self) -> str:
        """The same for the next rank of the ring."""
        return self._traffic[(self.rank + 1) % self.world_size]

    @abstractmethod
    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Sum a flat fp32 bucket that the caller gives up; the future holds the sum, in the bucket's own memory.

        Whatever a codec drops is added to `unsent`, of the bucket's shape, where one is given.
        """
