"""What is known of a running trial: what was measured, and what clients have asked of it."""

import asyncio
from dataclasses import dataclass, field

from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import HeldOutPoint
from paceline.runtime.server.link_use import LinkUse


@dataclass
class Request:
    """Something a client wants done to a running trial, at its next barrier."""

    strategy: Strategy | None
    """A live switch to this strategy; None: take a snapshot."""
    done: "asyncio.Future[int | Snapshot]"
    """Generation of the switch, or the snapshot."""


@dataclass
class Record:
    """What was measured so far. Steps that a recovery undid are taken out again."""

    steps: list[StepDone] = field(default_factory=list)
    curve: list[HeldOutPoint] = field(default_factory=list)
    snapshot: Snapshot | None = None
    generations: int = 0
    start_seconds: float = 0.0
    stalls: list[float] = field(default_factory=list)
    link_use: LinkUse = field(default_factory=LinkUse)

    @property
    def seconds(self) -> float:
        """Training time, s."""
        return sum(step.seconds for step in self.steps)

    @property
    def samples(self) -> int:
        """Samples trained on."""
        return sum(stop - start for step in self.steps for start, stop in step.samples)
