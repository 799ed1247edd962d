"""How busy the links are, and whether they still carry what the cluster profile says."""

import statistics
from collections import deque
from collections.abc import Sequence

from paceline.runtime.domain.cluster import Tier
from paceline.runtime.measure import StepReport

SHIFT = 0.3
"""Part by which the rate of exchanges must move before the links are measured again."""
WINDOW_SECONDS = 6.0
WINDOW_STEPS = 8


class LinkUse:
    """Counts what leaves each group of each tier."""

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        self._tiers = tiers
        self._bytes = [[0] * len(tier.groups) for tier in tiers]
        self._group_of = [
            {device: group for group, held in enumerate(tier.groups) for device in held} for tier in tiers
        ]
        self._seconds = 0.0

    def add(self, devices: Sequence[int], reports: Sequence[StepReport]) -> None:
        """Take a step: the device of each rank, and the reports about all parts of the step."""
        self._seconds += statistics.fmean(report.seconds for report in reports)
        inside: set[str] = set()
        for tier, group_of, counts in zip(self._tiers, self._group_of, self._bytes, strict=True):
            inside.add(tier.name)
            for report in reports:
                leaving = sum(count for name, count in report.wire_bytes.items() if name not in inside)
                counts[group_of[devices[report.rank]]] += leaving

    @property
    def utilisation(self) -> dict[str, float]:
        """By tier: rate of what leaves the group whose way out is busiest / what that way out can carry."""
        if not self._seconds:
            return {}
        return {
            tier.name: max(count / self._seconds / uplink for count, uplink in zip(counts, tier.uplinks, strict=True))
            for tier, counts in zip(self._tiers, self._bytes, strict=True)
        }


class LinkWatch:
    """Compares the rate of exchanges with what it was when the generation began."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._seconds = 0.0
        self._first: float | None = None

    def add(self, seconds: float, sent_bytes: int, exchange_seconds: float) -> bool:
        """Take a step that exchanged something; whether the rate has moved for good, judged by a window's median."""
        if not sent_bytes or exchange_seconds <= 0:
            return False
        self._steps.append((seconds, sent_bytes / exchange_seconds))
        self._seconds += seconds
        while len(self._steps) > WINDOW_STEPS and self._seconds - self._steps[0][0] >= WINDOW_SECONDS:
            self._seconds -= self._steps.popleft()[0]
        if len(self._steps) < WINDOW_STEPS or self._seconds < WINDOW_SECONDS:
            return False
        rate = statistics.median(rate for _, rate in self._steps)
        if self._first is None:
            self._first = rate
            return False
        return not 1 - SHIFT < rate / self._first < 1 / (1 - SHIFT)
