"""Workloads for tests: tiny, deterministic, and able to fail at a chosen sample in a chosen phase.

A fault is a JSON file named by PACELINE_TEST_FAULT: {"sample": index, "phase": ..., "action": ...}. Whoever trains on
that sample removes the file and then fails, so each fault happens once.
"""

import json
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from paceline.runtime.workloads.base import Workload

FAULT_VARIABLE = "PACELINE_TEST_FAULT"


def _fault(indices: Tensor) -> dict[str, Any] | None:
    path = Path(os.environ.get(FAULT_VARIABLE, "."))
    try:
        fault: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        return None
    if fault["sample"] not in indices.tolist():
        return None
    path.unlink()
    return fault


def _act(action: str) -> None:
    match action:
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), getattr(signal, action))
        case "SIGKILL two" | "SIGKILL all":
            others = [process for process in psutil.Process(os.getppid()).children() if process.pid != os.getpid()]
            for process in others[: 1 if action == "SIGKILL two" else None]:
                process.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGKILL another and stall":
            next(process for process in psutil.Process(os.getppid()).children() if process.pid != os.getpid()).kill()
            threading.Event().wait()
        case "MemoryError":
            raise MemoryError("no memory for the test")
        case "ValueError":
            raise ValueError("a mistake in the user's loss")


class Regression(Workload):
    """Linear regression with a hidden layer; 13 samples per batch divide by no world size above 1."""

    name = "regression"
    doc = "Regression on fixed random data."
    variants = {
        "sgd": {},
        "momentum": {"momentum": 0.9},
        "dropout": {"dropout": 0.5},
        "norm": {"norm": True},
        "steep": {"steep": True},
    }
    global_batch = 13
    train_samples = 100
    heldout_samples = 20

    steep_sample = 8
    """With `steep`, the gradient of a batch with this sample is too large for fp16, and that of no other."""

    def __init__(self, *, momentum: float = 0.0, dropout: float = 0.0, norm: bool = False, steep: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(self.train_samples + self.heldout_samples, 6, generator=generator)
        self._targets = self._inputs @ torch.randn(6, 2, generator=generator)
        self._momentum, self._dropout, self._norm, self._steep = momentum, dropout, norm, steep
        self._pending: dict[str, Any] | None = None

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self._norm else nn.Identity()
        return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(self._dropout), nn.Linear(8, 2))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        lr = 0.8 if self._steep else 0.05
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=self._momentum)
        optimizer.register_step_pre_hook(lambda *_: self._reach("optimizer"))
        return optimizer

    def batch(self, indices: Tensor, *, heldout: bool = False) -> tuple[Tensor, Tensor]:
        if not heldout:
            # A sync mode may compute a step's loss once before the step itself; the fault must still be there then.
            self._pending = _fault(indices) or self._pending
        offset = self.train_samples if heldout else 0
        return self._inputs[indices + offset], self._targets[indices + offset]

    def _reach(self, phase: str) -> None:
        if self._pending is not None and self._pending["phase"] == phase:
            fault, self._pending = self._pending, None
            _act(fault["action"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        self._reach("forward")
        loss = nn.functional.mse_loss(model(inputs), targets)
        if self._pending is not None and self._pending["phase"] == "nan":
            loss, self._pending = loss * float("nan"), None
        if self._pending is not None and self._pending["phase"] == "spike":
            loss, self._pending = loss + 1000.0, None
        if self._steep:
            loss = loss / 16
            if (inputs == self._inputs[self.steep_sample]).all(dim=1).any():
                loss = loss.detach() + 1e6 * (loss - loss.detach())
        if loss.requires_grad:
            loss.register_hook(lambda _: self._reach("backward"))
        return loss

    def flops_per_sample(self) -> float:
        return 6.0 * (6 * 8 + 8 * 2)


class Pair(Regression):
    """Two samples per batch: too few for four ranks."""

    name = "pair"
    doc = "Regression on fixed random data, two samples at a time."
    variants = {"": {}}
    global_batch = 2
