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
from paceline.runtime.sync.base import SYNC_MODES, LossFunction, Replica, StepOutcome, SyncConfig, SyncMode


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(SyncConfig):
    """All-reduce has only the common knobs."""


@SYNC_MODES.register
class AllReduce(SyncMode):
    """Synchronous data parallelism: DDP's reducer fills buckets, a comm hook hands them to the averager.

    Exchanges overlap the rest of the backward pass. Source: Li et al., "PyTorch Distributed", arXiv:2006.15704.
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

    def prepare(self, loss_function: LossFunction) -> None:
        """Run a backward pass that exchanges and changes nothing.

        DDP lays its buckets out anew after the first backward pass, in the order in which gradients became ready.
        The layout decides the order of summation and what a sparsifying codec selects, so without this pass a
        restored job would differ in the last bits from one that was never interrupted.
        """
        buffers = self._copy_buffers()
        self._exchange = False
        try:
            with torch.random.fork_rng(devices=[]):
                loss_function(self.ddp).backward()
        finally:
            self._exchange = True
            self.replica.optimizer.zero_grad()
            self._restore_buffers(buffers)

    def step(self, loss_function: LossFunction) -> StepOutcome:
        """One DDP step."""
        self.replica.optimizer.zero_grad()
        buffers = self._copy_buffers()
        try:
            loss = loss_function(self.ddp)
            (loss * self.replica.gradient_scale).backward()
        except BaseException:
            # A step that failed is done again, and must find what it found the first time.
            self._restore_buffers(buffers)
            raise
        exposed = time.perf_counter() - self._last_launch
        # DDP broadcasts rank 0's buffers before every forward pass.
        if self._buffer_bytes:
            self.averager.count_broadcast(self._buffer_bytes)
        began = time.perf_counter()
        self.replica.optimizer.step()
        return StepOutcome(
            loss=float(loss.detach()), exposed_seconds=exposed, optimizer_seconds=time.perf_counter() - began
        )

    def _copy_buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.replica.model.buffers()]

    @torch.no_grad()
    def _restore_buffers(self, copies: list[Tensor]) -> None:
        for buffer, copy in zip(self.replica.model.buffers(), copies, strict=True):
            buffer.copy_(copy)

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
        # Listing a bucket's parameters costs more than the rest of this hook.
        layout: Layout = ()
        if self.averager.needs_layout:
            layout = tuple((self._names[id(p)], p.shape) for p in bucket.parameters())
        future = self.averager.start(bucket.buffer(), layout)
        self._last_launch = time.perf_counter()
        return future

    def detach(self) -> None:
        """Drop DDP and with it the hooks on the parameters."""
        super().detach()
        self._ddp = None


def _average_bucket(mode: AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return mode.average(bucket)
