"""What a rank measures about a step."""

from dataclasses import dataclass, field

from paceline.runtime.domain.trial import StepSplit


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step on one rank."""

    step: int
    """1 for the first step of the trial."""
    generation: int
    """Generation it ran in."""
    rank: int
    """Who did it."""
    seconds: float
    """From the end of the previous step to the end of this one, s."""
    split: StepSplit
    """Where the time went on this rank."""
    optimizer_seconds: float
    """Part of the compute time that does not depend on the number of samples, s."""
    loss: float
    """Mean loss over this rank's samples."""
    sample_start: int
    """First position of the sample stream that this rank trained on."""
    sample_stop: int
    """One past the last."""
    staleness: int = 0
    """Updates of the weights that its gradient knew nothing of; see `StepOutcome`."""
    skipped: bool = False
    """Whether its gradient, or the mean that it is part of, was not finite, so that it was not applied."""
    loss_scale: float = 1.0
    """Factor on the loss against gradients that are too small for the number format; 1 where none is needed."""
    wire_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes sent by this rank, per tier."""
    local_square_norm: float | None = None
    """|gradient over this rank's samples|^2, on the steps where it is measured."""
    mean_square_norm: float | None = None
    """|gradient over the global batch|^2, on the steps where it is measured."""

    @property
    def samples(self) -> int:
        """Samples this rank trained on."""
        return self.sample_stop - self.sample_start
