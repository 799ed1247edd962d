"""Gradients averaged every step by DistributedDataParallel."""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime.compress.base import Layout
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.sync.base import (
    SYNC_MODES,
    Claim,
    LossFunction,
    Replica,
    StepOutcome,
    SyncConfig,
    SyncMode,
    copy_buffers,
    restore_buffers,
    step_optimizer,
)
from paceline.runtime.sync.parts import EVEN, LayeredConfig, layers


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(LayeredConfig):
    """All-reduce has only the common knobs."""


@SYNC_MODES.register
class AllReduce(SyncMode):
    """Synchronous data parallelism: DDP's reducer fills buckets, a comm hook hands them to the averager.

    Exchanges overlap the rest of the backward pass. Source: Li et al., "PyTorch Distributed", arXiv:2006.15704.

    A layer of period p is exchanged, and stepped by the optimizer, in every p-th step of the trial only, with the mean
    of the gradients since; until then its parameters rest, so replicas stay equal.
    """

    name = "allreduce"
    Config: ClassVar[type[SyncConfig]] = AllReduceConfig
    replicas_equal = True
    exchanges_gradients = True

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        super().__init__(config, replica, averager)
        self._names = {id(parameter): name for name, parameter in replica.model.named_parameters()}
        self._buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in replica.model.buffers())
        self._last_launch = 0.0
        self._exchange = True
        self._step = 0
        self._periods = _periods(replica, config)
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(
            replica.model,
            process_group=averager.group,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(self, _average_bucket)

    @property
    def ddp(self) -> DistributedDataParallel:
        """The wrapped model."""
        assert self._ddp is not None, "the mode was detached"
        return self._ddp

    def claim(self, steps_done: int) -> Claim:
        """As any mode; which layers are exchanged depends on the step."""
        self._step = steps_done + 1
        return super().claim(steps_done)

    def prepare(self, loss_function: LossFunction) -> None:
        """Run a backward pass that exchanges and changes nothing.

        DDP lays its buckets out anew after the first backward pass, in the order in which gradients became ready.
        The layout decides the order of summation and what a sparsifying codec selects, so without this pass a
        restored job would differ in the last bits from one that was never interrupted.
        """
        buffers = copy_buffers(self.replica.model)
        self._exchange = False
        try:
            with torch.random.fork_rng(devices=[]):
                loss_function(self.ddp).backward()
        finally:
            self._exchange = True
            self.replica.optimizer.zero_grad()
            restore_buffers(self.replica.model, buffers)

    def step(self, loss_function: LossFunction) -> StepOutcome:
        """One DDP step."""
        self.replica.optimizer.zero_grad()
        buffers = copy_buffers(self.replica.model)
        try:
            loss = loss_function(self.ddp)
            (loss * (self.replica.gradient_scale * self.replica.loss_scale.factor)).backward()
        except BaseException:
            # A step that failed is done again, and must find what it found the first time.
            restore_buffers(self.replica.model, buffers)
            raise
        exposed = time.perf_counter() - self._last_launch
        # DDP broadcasts rank 0's buffers before every forward pass.
        if self._buffer_bytes:
            self.averager.count_broadcast(self._buffer_bytes)
        self._let_layers_rest()
        skipped, seconds = step_optimizer(self.replica, buffers)
        if skipped:
            self.averager.discard_step()
        return StepOutcome(
            loss=float(loss.detach()), exposed_seconds=exposed, optimizer_seconds=seconds, skipped=skipped
        )

    def settle(self) -> None:
        """Give every rank rank 0's buffers, as DDP does at the next forward pass."""
        for buffer in self.replica.model.buffers():
            dist.broadcast(buffer, group_src=0, group=self.averager.group)

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Exchange one of DDP's buckets."""
        if not self._exchange:
            ready: torch.futures.Future[Tensor] = torch.futures.Future()
            ready.set_result(bucket.buffer())
            return ready
        self.replica.loss_scale.unscale(bucket.buffer())
        if self._periods:
            future = self._average_layers(bucket)
            self._last_launch = time.perf_counter()
            return future
        # Listing a bucket's parameters costs more than the rest of this hook.
        layout: Layout = ()
        if self.averager.needs_layout:
            layout = tuple((self._names[id(p)], p.shape) for p in bucket.parameters())
        future = self.averager.start(bucket.buffer(), layout)
        self._last_launch = time.perf_counter()
        return future

    def _average_layers(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Exchange the layers that are due, those of each period in one piece, and leave the others to later steps."""
        buffer, stop = bucket.buffer(), 0
        pieces: dict[int, list[tuple[str, Tensor]]] = {}
        for parameter in bucket.parameters():
            name, start, stop = self._names[id(parameter)], stop, stop + parameter.numel()
            pieces.setdefault(self._periods[name], []).append((name, buffer[start:stop].view_as(parameter)))
        # A mean over steps is no gradient of one batch, of which the noise scale could be estimated.
        self.averager.measure_norms = False
        means, views = [], []
        for period, piece in pieces.items():
            layout = tuple((name, gradient.shape) for name, gradient in piece)
            flat = torch.cat([gradient.reshape(-1) for _, gradient in piece]).div_(period)
            if self._step % period == 0:
                means.append(self.averager.start(flat, layout))
                views.append([gradient for _, gradient in piece])
            else:
                if self.replica.loss_scale.checks:
                    # No other rank has seen it, so it cannot void their step: it is left out.
                    flat.nan_to_num_(0.0, 0.0, 0.0)
                self.averager.defer(flat, layout)
        return torch.futures.collect_all(means).then(lambda done: _scatter(done.value(), views, buffer))

    def _let_layers_rest(self) -> None:
        """Take the gradients that wait away, as optimizers pass over parameters without one."""
        for name, parameter in self.replica.model.named_parameters():
            if self._step % self._periods.get(name, 1):
                parameter.grad = None

    def detach(self) -> None:
        """Drop DDP and with it the hooks on the parameters."""
        super().detach()
        self._ddp = None


def _periods(replica: Replica, config: SyncConfig) -> dict[str, int]:
    """Period of each parameter in steps, by name; empty where all are exchanged in every step."""
    if not isinstance(config, LayeredConfig) or config.layer_periods == EVEN:
        return {}
    return {
        name: period for period, parameters in layers(replica.model, config.layer_periods) for name, _ in parameters
    }


def _scatter(means: list[torch.futures.Future[Tensor]], views: list[list[Tensor]], buffer: Tensor) -> Tensor:
    for mean, piece in zip(means, views, strict=True):
        for view, part in zip(piece, mean.value().split([view.numel() for view in piece]), strict=True):
            view.copy_(part.view_as(view))
    return buffer


def _average_bucket(mode: AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return mode.average(bucket)
