"""What a running trial streams to its client."""

from dataclasses import dataclass

from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import HeldOutPoint, StepSplit, TrialResult


@dataclass(frozen=True, kw_only=True)
class TrialStarted:
    """A generation was committed: the first of a trial, a live switch, or a recovery.

    Steps after `step` that an earlier generation reported are void: they are done again.
    """

    trial_id: str
    """Trial it belongs to."""
    generation: int
    """Number of the generation."""
    step: int
    """Step at which it takes over."""
    strategy: Strategy
    """Strategy in force from this step."""
    devices: tuple[int, ...]
    """Device index of each rank."""
    standstill_seconds: float
    """Time in which no rank trained before this generation was ready, s: what the change cost."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One optimizer step, over all ranks."""

    step: int
    """1 for the first."""
    generation: int
    """Generation it ran in."""
    seconds: float
    """Wall time, s, mean over ranks (their sums are equal over any stretch between two sync points)."""
    split: StepSplit
    """Mean over ranks."""
    loss: float
    """Mean training loss over the global batch."""
    wire_bytes: dict[str, int]
    """Bytes sent by all ranks, per tier."""
    samples: tuple[tuple[int, int], ...]
    """Half-open range of the sample stream that each part of the global batch is, in order. In synchronous modes the
    part of each rank, by rank; also below."""
    noise_scale: float | None
    """Gradient noise scale, samples, on the steps where it is measured."""
    load_balance_error: float
    """(slowest - mean)/mean of the ranks' compute time."""
    compute_seconds: tuple[float, ...]
    """Time that each rank computed, by rank, s."""
    optimizer_seconds: tuple[float, ...]
    """Part of it that does not depend on the number of samples, by rank, s."""
    staleness: tuple[int, ...]
    """Updates of the weights that the gradient of each part of the global batch knew nothing of when it was applied;
    all 0 in synchronous modes."""
    skipped: int
    """Ranks whose optimizer was not stepped, as a gradient was not finite. Its samples count as used."""
    loss_scale: float
    """Factor on the loss against gradients that are too small for the number format, the smallest of all ranks; 1 where
    none is needed."""
    exchange_seconds: float
    """Time in which an exchange was under way at the rank that joined last, so without waiting for it, s."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A held-out evaluation."""

    step: int
    """Steps done."""
    point: HeldOutPoint
    """Seconds, samples, loss."""


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken:
    """A snapshot was committed."""

    snapshot: Snapshot
    """Its manifest."""


@dataclass(frozen=True, kw_only=True)
class TrialFinished:
    """The budget is used up."""

    result: TrialResult
    """What was measured."""


@dataclass(frozen=True, kw_only=True)
class TrialFailed:
    """The trial ended with a failure label; the runtime goes on."""

    result: TrialResult
    """What was measured until then; `failure` and `message` are set."""


TrialEvent = TrialStarted | StepDone | Evaluated | SnapshotTaken | TrialFinished | TrialFailed
