"""A trial: a workload run on the cluster under a strategy for a budget."""

import math
from dataclasses import dataclass, field

from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a trial ends: at the first of the limits that are set."""

    steps: int | None = None
    """Optimizer steps, at least 1."""
    seconds: float | None = None
    """Training time, s, without evaluation and snapshots."""
    target_loss: float | None = None
    """Held-out loss to reach; needs `steps` or `seconds` beside it, as it may never be reached."""

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise InvalidRequest("a budget needs steps or seconds; for example steps=200")
        if self.steps is not None and self.steps < 1:
            raise InvalidRequest(f"budget: steps={self.steps} must be at least 1")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InvalidRequest(f"budget: seconds={self.seconds} must be positive and finite")
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise InvalidRequest(f"budget: target_loss={self.target_loss} must be finite")


@dataclass(frozen=True, kw_only=True)
class TimedChange:
    """A change of the cluster at a point of a trial, so that what follows from it can be studied again and again."""

    change: str
    """`TARGET.SETTING=VALUE`, as the cluster's launcher understands it, e.g. `n3.speed=0.1`."""
    step: int | None = None
    """Make it once so many steps of the trial are done, at least 1."""
    seconds: float | None = None
    """Make it so many seconds after the trial's first step began."""

    def __post_init__(self) -> None:
        if (self.step is None) == (self.seconds is None):
            raise InvalidRequest(f"timed change {self.change!r} needs either a step or seconds")
        if self.step is not None and self.step < 1:
            raise InvalidRequest(f"timed change {self.change!r}: step={self.step} must be at least 1")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise InvalidRequest(f"timed change {self.change!r}: seconds={self.seconds} must be finite, not negative")


def parse_timed_change(text: str) -> TimedChange:
    """Read `50:TARGET.SETTING=VALUE` (after a step) or `20s:TARGET.SETTING=VALUE` (after so many seconds).

    Raises InvalidRequest.
    """
    when, _, change = text.partition(":")
    try:
        if when.endswith("s"):
            return TimedChange(change=change, seconds=float(when[:-1]))
        return TimedChange(change=change, step=int(when))
    except ValueError:
        raise InvalidRequest(
            f"timed change {text!r} must begin with a step or seconds: 50:e0.speed=0.1 or 20s:e0.speed=0.1"
        ) from None


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """What a client asks for. Equal specs give comparable trials: same start state, same sample order."""

    workload: str
    """Workload reference, e.g. `bytes-lm/tiny`."""
    strategy: Strategy
    """Full strategy, as `KnobSpace.strategy` returns it."""
    budget: Budget
    """When it ends."""
    world_size: int = 0
    """Ranks; 0: one per device of the cluster."""
    seed: int = 0
    """Seed of initial weights and sample order; ignored for the weights when `start_snapshot` is set."""
    start_snapshot: str = ""
    """Snapshot to start from; empty: from the seed."""
    warmup_steps: int = 5
    """Steps left out of throughput; held-out curves include them."""
    evaluations: int = 5
    """Held-out evaluations, evenly spaced over the budget, the last at its end; at least 1."""
    snapshot_every: int = 0
    """Take a snapshot each so many steps; 0: none."""
    on_worker_lost: str = "replace"
    """`replace`: go on from the last agreed state with a new worker; `fail`: end with `worker_lost`."""
    timeline: tuple[TimedChange, ...] = ()
    """Changes of the cluster during the trial; undone at its end, so that the next trial finds what this one found."""

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise InvalidRequest(f"evaluations={self.evaluations} must be at least 1")
        for name in ("world_size", "warmup_steps", "snapshot_every", "seed"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name}={getattr(self, name)} must not be negative")
        if self.on_worker_lost not in ("replace", "fail"):
            raise InvalidRequest(f"on_worker_lost={self.on_worker_lost!r} must be replace or fail")


@dataclass(frozen=True, kw_only=True)
class StepSplit:
    """Where the time of a step went: mean over ranks and steps, s."""

    compute: float = 0.0
    """Forward, backward, optimizer and codec."""
    communication_exposed: float = 0.0
    """Waiting for an exchange with nothing left to compute."""
    communication_hidden: float = 0.0
    """Exchanges that ran while gradients were still being computed."""
    data_wait: float = 0.0
    """Waiting for the batch."""
    snapshot_stall: float = 0.0
    """Standing still for a snapshot."""

    @property
    def communication(self) -> float:
        """Time in which an exchange was under way, s."""
        return self.communication_exposed + self.communication_hidden

    @property
    def total(self) -> float:
        """Wall time of the step, s: everything but what was hidden."""
        return self.compute + self.communication_exposed + self.data_wait + self.snapshot_stall


@dataclass(frozen=True, kw_only=True)
class HeldOutPoint:
    """One held-out evaluation."""

    seconds: float
    """Training time so far, s."""
    samples: int
    """Samples trained on so far, all ranks together."""
    loss: float
    """Mean held-out loss of the synchronised model."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial measured. A failed trial has a label, and its figures are never taken for a result."""

    workload: str
    """Workload reference."""
    cluster: str
    """Cluster name."""
    strategy: Strategy
    """Strategy at the end of the trial."""
    world_size: int
    """Ranks."""
    generations: int
    """Generations used; more than 1 means a live switch or a recovery took place."""
    steps: int
    """Optimizer steps done."""
    samples: int
    """Samples trained on, all ranks together."""
    seconds: float
    """Training time, s, without evaluation."""
    examples_per_second: float
    """Throughput after warm-up."""
    examples_per_second_interval: tuple[float, float]
    """95 % interval of the throughput from batch means."""
    goodput: float
    """Throughput x statistical efficiency, examples/s."""
    goodput_interval: tuple[float, float]
    """95 % interval of the goodput."""
    goodput_basis: str
    """`reference`: efficiency against a reference trial's held-out curve; `estimate`: no reference was at hand."""
    heldout_curve: tuple[HeldOutPoint, ...]
    """Held-out loss over the trial; the first point is the start state."""
    step_seconds: StepSplit
    """Where a step's time went."""
    wire_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes sent by all ranks, per tier."""
    load_balance_error: float = 0.0
    """(slowest - mean)/mean of compute time per step."""
    noise_scale: float | None = None
    """Gradient noise scale, samples, where the sync mode exchanges gradients."""
    peak_memory_bytes: int = 0
    """Largest resident set of a worker."""
    start_seconds: float = 0.0
    """From the request to the first step, s."""
    snapshot: str = ""
    """Newest snapshot taken of the trial."""
    failure: str | None = None
    """None, or a label: `oom`, `diverged`, `illegal`, `timeout`, `worker_lost`, `cancelled`, `error`."""
    message: str = ""
    """One line about the failure."""
    link_utilisation: dict[str, float] = field(default_factory=dict)
    """Rate of the traffic on the busiest link of each tier / what that link can carry."""
    staleness: float = 0.0
    """Updates of the weights that a gradient knew nothing of when it was applied, mean; 0 in synchronous modes."""
    skipped_steps: int = 0
    """Steps that were not applied, or not by all ranks, as a gradient was not finite."""

    @property
    def heldout_loss(self) -> float | None:
        """The last held-out loss, or None where none was measured."""
        return self.heldout_curve[-1].loss if self.heldout_curve else None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial as the runtime lists it."""

    trial_id: str
    """Unique on this runtime."""
    request_id: str
    """Request that made it; the same id never makes a second."""
    spec: TrialSpec
    """What was asked for."""
    state: str
    """`queued`, `running`, `finished` or `failed`."""
    step: int
    """Steps done."""
    generation: int
    """Current generation."""
    result: TrialResult | None
    """Set when finished or failed."""
