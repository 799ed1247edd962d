"""A workload that needs more memory than the devices of a lab have."""

import torch
from torch import Tensor, nn

from tests.runtime.trainable import Regression


class Hungry(Regression):
    """Trains on a gigabyte of scratch space."""

    name = "hungry"
    doc = "Uses up memory."
    variants = {"": {}}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            torch.ones(2**28)
        return super().loss(model, batch)


class Heavy(Regression):
    """Six million parameters: each copy of them takes 24 MB, and some strategies keep many."""

    name = "heavy"
    doc = "A wide layer."
    variants = {"": {}}
    width = 6_000_000 // 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 2))
