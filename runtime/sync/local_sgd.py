"""Parameters averaged every few steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.runtime.compress.base import Layout
from paceline.runtime.domain.domains import Number
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.knobs import knob
from paceline.runtime.sync.base import (
    SYNC_MODES,
    LossFunction,
    Replica,
    StepOutcome,
    SyncConfig,
    SyncMode,
    average_in_place,
    wait_seconds,
)


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig(SyncConfig):
    """Knobs of local SGD."""

    period: int = knob("sync.period", Number(low=1, high=64, log=True, integer=True), default=8)
    """Local optimizer steps between two averagings of the parameters, 1 to 64."""


@SYNC_MODES.register
class LocalSgd(SyncMode):
    """Every rank steps on its own samples; every `period` steps the parameter changes are averaged.

    What travels is the change since the last averaging, so codecs see small numbers and error feedback applies as it
    does to gradients. Optimizer state stays local. Source: Stich, "Local SGD Converges Fast and Communicates Little",
    arXiv:1805.09767.
    """

    name = "local_sgd"
    Config = LocalSgdConfig
    replicas_equal = False
    exchanges_gradients = False

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        super().__init__(config, replica, averager)
        assert isinstance(config, LocalSgdConfig)
        self.period = config.period
        self._since_sync = 0
        self._buckets = _buckets(replica.model, self.bucket_bytes)
        self._anchors = [_flatten(parameters) for _, parameters in self._buckets]

    @property
    def at_sync_point(self) -> bool:
        """Whether the parameters were averaged after the last step."""
        return self._since_sync == 0

    def step(self, loss_function: LossFunction) -> StepOutcome:
        """One local step; the last of a period ends with the averaging."""
        self.replica.optimizer.zero_grad()
        loss = loss_function(self.replica.model)
        loss.backward()
        began = time.perf_counter()
        self.replica.optimizer.step()
        stepped = time.perf_counter() - began
        self._since_sync += 1
        exposed = self._average() if self._since_sync == self.period else 0.0
        return StepOutcome(loss=float(loss.detach()), exposed_seconds=exposed, optimizer_seconds=stepped)

    @torch.no_grad()
    def _average(self) -> float:
        futures = []
        for (layout, parameters), anchor in zip(self._buckets, self._anchors, strict=True):
            change = anchor - _flatten(parameters)
            futures.append(self.averager.start(change.mul_(self.replica.gradient_scale), layout))
        changes, seconds = wait_seconds(futures)
        for (_, parameters), anchor, change in zip(self._buckets, self._anchors, changes, strict=True):
            anchor.sub_(change)
            _unflatten(anchor, parameters)
        buffers = list(self.replica.model.buffers())
        if buffers:
            began = time.perf_counter()
            average_in_place(buffers, self.averager.group)
            seconds += time.perf_counter() - began
            for buffer in buffers:
                count = self.averager.count_all_reduce if buffer.is_floating_point() else self.averager.count_broadcast
                count(buffer.numel() * buffer.element_size())
        self._since_sync = 0
        return seconds

    def settle(self) -> None:
        """Average now if there are local steps that were not."""
        if not self.at_sync_point:
            self._average()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average a copy, uncompressed, and put this rank's own weights back afterwards."""
        own = [tensor.detach().clone() for tensor in _weights(self.replica.model)]
        if not self.at_sync_point:
            with torch.no_grad():
                average_in_place(_weights(self.replica.model), self.averager.group)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, saved in zip(_weights(self.replica.model), own, strict=True):
                    tensor.copy_(saved)

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The parameters at the last averaging, by name, and the local steps since."""
        anchors = {}
        for (layout, _), anchor in zip(self._buckets, self._anchors, strict=True):
            pieces = anchor.split([shape.numel() for _, shape in layout])
            anchors.update({name: piece for (name, _), piece in zip(layout, pieces, strict=True)})
        return anchors, {"since_sync": self._since_sync}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over anchors and phase; a phase beyond the period averages at the next step."""
        self._anchors = [torch.cat([tensors[name].reshape(-1) for name, _ in layout]) for layout, _ in self._buckets]
        self._since_sync = min(numbers["since_sync"], self.period - 1)


def _weights(model: nn.Module) -> list[Tensor]:
    return [*(parameter.data for parameter in model.parameters()), *model.buffers()]


def _buckets(model: nn.Module, bucket_bytes: int) -> list[tuple[Layout, list[nn.Parameter]]]:
    buckets: list[tuple[Layout, list[nn.Parameter]]] = []
    filled = bucket_bytes
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        size = parameter.numel() * parameter.element_size()
        if filled + size > bucket_bytes:
            buckets.append(((), []))
            filled = 0
        layout, parameters = buckets[-1]
        buckets[-1] = ((*layout, (name, parameter.shape)), [*parameters, parameter])
        filled += size
    return buckets


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _unflatten(flat: Tensor, parameters: list[nn.Parameter]) -> None:
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data.copy_(piece.view_as(parameter))
