"""Workloads for the lab: such as need more memory than its devices have, and one that keeps them busy."""

import torch
from torch import Tensor, nn

from paceline.runtime.workloads.bytes_lm import BytesLM
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


class Busy(BytesLM):
    """So many samples per step that the time which no sample needs does not count."""

    name = "busy"
    doc = "A large batch."
    variants = {"": {"width": 64, "layers": 2, "context": 32, "global_batch": 256, "learning_rate": 4e-3}}
