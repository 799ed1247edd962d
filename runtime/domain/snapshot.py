"""A snapshot: a restorable state of a trial."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SnapshotPart:
    """One stored object of one rank: a group of tensors or a JSON document."""

    rank: int
    """Rank whose state it is."""
    name: str
    """`model`, `optimizer`, `sync`, `residuals`, `rng`."""
    digest: str
    """SHA-256 of the uncompressed content, hex; also the object's name in the store."""
    size: int
    """Uncompressed bytes."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The manifest of a snapshot. It is written last, so a snapshot that can be read is complete."""

    snapshot_id: str
    """Unique in the store."""
    trial_id: str
    """Trial that it was taken of."""
    workload: str
    """Workload reference; a snapshot restores into the same workload only."""
    step: int
    """Optimizer steps done; the state is exactly that after this step."""
    cursor: int
    """Samples consumed from the sample stream by all ranks together."""
    world_size: int
    """Ranks whose state it holds."""
    seed: int
    """Seed of the sample order."""
    strategy: dict[str, bool | int | float | str]
    """Knob values in force."""
    parts: tuple[SnapshotPart, ...]
    """Every rank's objects."""
