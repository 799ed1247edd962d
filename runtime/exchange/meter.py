"""What one rank exchanges during a step."""

from dataclasses import dataclass, field


@dataclass
class StepMeter:
    """Counts for one step. Exchanges write into it from their own threads, each under a key or list of its own."""

    wire_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes sent by this rank, per tier."""
    intervals: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each exchange that has ended and was not counted, on the `time.perf_counter` clock, s."""
    local_square_norm: float = 0.0
    """|this rank's bucket|^2 summed over buckets, before averaging; where norms are measured."""
    mean_square_norm: float = 0.0
    """|mean bucket|^2 summed over buckets; where norms are measured."""

    def add_bytes(self, tier: str, count: int) -> None:
        """Count bytes sent by this rank on a tier."""
        self.wire_bytes[tier] = self.wire_bytes.get(tier, 0) + count

    def busy_seconds(self) -> float:
        """Seconds in which at least one of the exchanges that have ended since the last call was under way."""
        ended = [self.intervals.pop() for _ in range(len(self.intervals))]
        busy, end = 0.0, 0.0
        for start, stop in sorted(ended):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return busy
