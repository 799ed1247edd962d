"""Sees every step of a generation, and says when the cluster is no longer as it was taken to be."""

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.mapping import SHARES
from paceline.runtime.server.balance import LoadWatch
from paceline.runtime.server.generations import Generation
from paceline.runtime.server.link_use import LinkWatch
from paceline.runtime.sync import SYNC_MODES


class ClusterWatch:
    """How the load is shared and how fast the links are. Every generation gets a new one: what was found under the last
    was about its ranks."""

    def __init__(self, generation: Generation, cluster: Cluster, *, calibrates: bool) -> None:
        """`calibrates` as in `LoadWatch`."""
        follows = _follows_speed(generation.strategy)
        self._load = LoadWatch(generation.shares, calibrates=calibrates) if follows else None
        self._links = LinkWatch() if cluster.tiers else None
        self.speeds: tuple[float, ...] | None = None
        """Speeds in samples/s, by rank, that balance the load, once it has moved."""
        self.links_moved = False
        """Whether exchanges go faster or slower than at first."""

    def add(self, step: StepDone) -> bool:
        """Take a step; whether anything has moved."""
        if self._load is not None:
            self.speeds = self._load.add(step) or self.speeds
        if self._links is not None:
            sent = sum(step.wire_bytes.values())
            self.links_moved |= self._links.add(step.seconds, sent, step.exchange_seconds)
        return self.speeds is not None or self.links_moved

    def links_probed(self) -> None:
        """What exchanges now are compared with is how fast they go from here on."""
        self.links_moved, self._links = False, LinkWatch()


def _follows_speed(strategy: Strategy) -> bool:
    rule = str(strategy["mapping.batch_share"])
    # Out of lockstep no part of a batch belongs to a device.
    in_lockstep = SYNC_MODES.get(str(strategy["sync.mode"])).lockstep
    return in_lockstep and rule in SHARES.names() and SHARES.get(rule).follows_speed
