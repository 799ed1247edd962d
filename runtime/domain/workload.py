"""What is trained, as numbers: the part of a workload that a policy and the simulator look at."""

from dataclasses import dataclass

from paceline.runtime.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class WorkloadProfile:
    """A registered workload as its runtime describes it."""

    name: str
    """Reference by which a client names it: `name` or `name/variant`, e.g. `bytes-lm/tiny`."""
    doc: str
    """What it is, one sentence."""
    global_batch: int
    """Samples per optimizer step over all ranks."""
    train_samples: int
    """Samples in the training set."""
    heldout_samples: int
    """Samples in the held-out set."""
    parameters: int
    """Trainable parameters."""
    parameter_tensors: int
    """Trainable parameter tensors (one launch of the optimizer each, roughly)."""
    flops_per_sample: float
    """Floating-point operations of one sample's forward and backward pass."""

    def __post_init__(self) -> None:
        for name in ("global_batch", "train_samples", "heldout_samples", "parameters", "parameter_tensors"):
            # Larger counts would overflow in the simulator, whose arithmetic is 64 bits wide.
            if not 1 <= getattr(self, name) <= 2**53:
                raise InvalidRequest(f"workload {self.name}: {name}={getattr(self, name)} must be from 1 to {2**53}")
        if not self.flops_per_sample > 0:
            raise InvalidRequest(f"workload {self.name}: flops_per_sample must be positive")

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one full fp32 gradient."""
        return 4 * self.parameters
