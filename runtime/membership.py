"""A rank's place in a generation."""

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.runtime.mapping.levels import Level

DESTROY_SECONDS = 3.0
"""How long a process group may take to end."""


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
    it with `destroy_groups`."""

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


def destroy_groups(groups: list[dist.ProcessGroup]) -> None:
    """Destroy process groups of which nobody else keeps hold; with the default one, all. The list is empty afterwards.

    A group ends once its collectives have. Gloo sometimes fails to tell one that its connections were cut, as what it
    is about to send just then is on no list of what to fail. Such a group is left to its timeout.
    """
    if dist.group.WORLD in groups:
        dist.destroy_process_group()
    else:
        for index in range(len(groups)):
            dist.destroy_process_group(groups[index])

    def end() -> None:
        groups.clear()
        # A failed step leaves cycles behind that keep a group, and so its threads, alive.
        gc.collect()

    thread = threading.Thread(target=end, daemon=True, name="destroy")
    thread.start()
    thread.join(DESTROY_SECONDS)
