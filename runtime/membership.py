"""A rank's place in a generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.runtime.mapping.levels import Level


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who trains together, and how they reach each other."""

    generation: int
    """Number of the generation."""
    group: dist.ProcessGroup
    """All ranks that train."""
    shares: Sequence[int]
    """Samples of a global batch, by rank."""
    store: dist.Store
    """Keys and counters that all ranks of the generation see."""
    tiers: Sequence[Level] = ()
    """Tiers of the network between the ranks and their reducers, the innermost first."""
    links: dist.ProcessGroup | None = None
    """The ranks that train, under the same numbers, and behind them their reducers; None where there are none."""
    subgroup: Callable[[Sequence[int]], dist.ProcessGroup]
    """Make a process group of some of the ranks, this one among them. A collective of those; whoever makes it destroys
    it with `torch.distributed.destroy_process_group`."""

    @property
    def reducers(self) -> int:
        """Processes that only add up what the ranks send."""
        return self.links.size() - self.world_size if self.links is not None else 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.group.size()

    def scale_of(self, part: int) -> float:
        """Factor on the mean loss, or the parameter change, of a part of the global batch so that the plain mean over
        all parts weighs samples equally: share x world size; 1 for even shares."""
        return self.shares[part] * len(self.shares) / sum(self.shares)
