"""Parameter changes averaged every few steps, as gradients of an outer optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.domain.domains import Number
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.knobs import knob
from paceline.runtime.sync.base import SYNC_MODES, Replica, SyncConfig
from paceline.runtime.sync.periodic import Periodic, PeriodicConfig


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(PeriodicConfig):
    """Knobs of `diloco`."""

    outer_lr: float = knob("sync.outer_lr", Number(low=0.1, high=2.0, log=True), default=0.7)
    """Learning rate of the outer optimizer, 0.1 to 2; 1 without momentum goes the whole way, as local SGD does."""
    outer_momentum: float = knob("sync.outer_momentum", Number(low=0.0, high=0.99), default=0.9)
    """Nesterov momentum of the outer optimizer, 0 to 0.99."""


@SYNC_MODES.register
class Diloco(Periodic):
    """Every `period` steps an outer optimizer takes the mean change of the parameters for a gradient.

    The inner optimizer is the user's; the outer one is SGD with Nesterov momentum, as torch.optim.SGD defines it, and
    equal on all ranks. Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, whose best outer learning rate and momentum are the defaults.
    """

    name = "diloco"
    Config = DilocoConfig

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        super().__init__(config, replica, averager)
        assert isinstance(config, DilocoConfig)
        self._lr, self._momentum = config.outer_lr, config.outer_momentum
        self._velocities = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}

    def take(self, name: str, anchor: Tensor, change: Tensor) -> None:
        """One outer step."""
        velocity = self._velocities[name].mul_(self._momentum).add_(change)
        anchor.sub_(change.add(velocity, alpha=self._momentum), alpha=self._lr)

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The outer momentum besides."""
        tensors, numbers = super().state()
        return tensors | {f"velocity.{name}": velocity for name, velocity in self._velocities.items()}, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over the outer momentum besides."""
        super().load_state(tensors, numbers)
        self._velocities = {name: tensors[f"velocity.{name}"].clone() for name in self._velocities}
