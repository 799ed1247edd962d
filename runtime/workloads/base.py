"""What a workload plug-in is: model, data, loss, optimizer and global batch of something to train."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.registry import Registry


class Workload(ABC):
    """Something to train. One instance per worker process and variant; data is loaded once and kept.

    Subclass it, name it, and start the runtime with `--workload module:Class`, or register an entry point in the
    group `paceline.workloads`. Everything must be a pure function of the arguments: samples are addressed by index,
    so that every generation of a job sees exactly the samples it should.
    """

    name: ClassVar[str]
    doc: ClassVar[str]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """Variant name -> keyword arguments of `__init__`. The first is the one meant by the bare name."""

    @property
    @abstractmethod
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""

    @property
    @abstractmethod
    def train_samples(self) -> int:
        """Size of the training set."""

    @property
    @abstractmethod
    def heldout_samples(self) -> int:
        """Size of the held-out set."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Called under the trial's seed: equal seeds give equal weights."""

    @abstractmethod
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer over the parameters."""

    @abstractmethod
    def batch(self, indices: Tensor, *, heldout: bool = False) -> Any:
        """The samples with these indices (int64, shape [b]) of the training or held-out set, in this order."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over the batch's samples: a scalar. `model` may be a wrapper around what `model()` returned."""

    @abstractmethod
    def flops_per_sample(self) -> float:
        """Floating-point operations of one sample's forward and backward pass; an estimate is enough."""

    def profile(self, reference: str) -> WorkloadProfile:
        """Describe this instance under the reference by which clients name it."""
        with torch.device("meta"):
            parameters = [p for p in self.model().parameters() if p.requires_grad]
        return WorkloadProfile(
            name=reference,
            doc=self.doc,
            global_batch=self.global_batch,
            train_samples=self.train_samples,
            heldout_samples=self.heldout_samples,
            parameters=sum(p.numel() for p in parameters),
            parameter_tensors=len(parameters),
            flops_per_sample=self.flops_per_sample(),
        )


WORKLOADS: Registry[type[Workload]] = Registry(
    "workload", package="paceline.runtime.workloads", entry_point_group="paceline.workloads"
)
