"""The mean of a flat bucket over all ranks, counted and timed, and what becomes of what it left unsent.

Sync modes exchange nothing by themselves: they hand buckets to a `BucketAverager`. It owns the residuals of error
feedback, which are staged and become effective only when the step is complete, so that a step that fails halfway
leaves no trace.
"""

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import JointCodec, Layout
from paceline.runtime.exchange.base import Exchange
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.ring import all_reduce_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


class BucketAverager:
    """Averages buckets over a process group. Calls must come in the same order on all ranks."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.meter = StepMeter()
        self.measure_norms = False
        self._residuals: dict[Layout, Tensor] = {}
        self._staged: dict[Layout, Tensor | None] = {}
        self._carried: dict[str, Tensor] = {}
        self._carried_used: set[str] = set()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that are averaged over."""
        return self.exchange.group

    @property
    def world_size(self) -> int:
        """Ranks that are averaged over."""
        return self.exchange.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.exchange.rank

    def release(self) -> None:
        """Let go of the group."""
        self.exchange.release()

    @property
    def needs_layout(self) -> bool:
        """Whether `start` looks at the layout: there are residuals to add or to keep."""
        exchange = self.exchange
        return exchange.needs_layout or exchange.codec.error_feedback or bool(self._carried) or bool(self._residuals)

    def start(self, bucket: Tensor, layout: Layout) -> torch.futures.Future[Tensor]:
        """Average a flat fp32 bucket that the caller gives up; the future holds the mean, of the same shape."""
        began = time.perf_counter()
        meter, measure_norms, world_size = self.meter, self.measure_norms, self.world_size
        if measure_norms:
            meter.local_square_norm += float(bucket.square().sum())
        self._add_residual(bucket, layout)
        # Dividing before encoding keeps the sum of large fp16 gradients finite.
        bucket.div_(world_size)
        unsent = torch.zeros_like(bucket) if self.exchange.codec.error_feedback else None
        if unsent is not None or layout in self._residuals:
            self._staged[layout] = unsent
        intervals = meter.intervals

        # The thread that runs and drops this must not be the one that drops the group: nothing here holds it.
        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            mean = done.value()
            if measure_norms:
                meter.mean_square_norm += float(mean.square().sum())
            if unsent is not None:
                # A part of the mean is as large a part of one rank's bucket times the number of ranks.
                unsent.mul_(world_size)
            intervals.append((began, time.perf_counter()))
            return mean

        return self.exchange.start(bucket, layout, unsent, meter).then(finish)

    def defer(self, bucket: Tensor, layout: Layout) -> None:
        """Leave a flat fp32 bucket, which the caller gives up, to the next exchange of its parameters."""
        self._add_residual(bucket, layout)
        self._staged[layout] = bucket

    def count_broadcast(self, size: int) -> None:
        """Count a broadcast of so many bytes by rank 0, which is done elsewhere."""
        if self.rank == 0:
            for peer in range(1, self.world_size):
                self.meter.add_bytes(self.exchange.traffic_to(peer), size)

    def count_all_reduce(self, size: int) -> None:
        """Count a ring all-reduce of so many bytes, which is done elsewhere."""
        sent = all_reduce_bytes(size, self.world_size, self.rank)
        self.meter.add_bytes(self.exchange.traffic_to_next, sent)

    def _add_residual(self, bucket: Tensor, layout: Layout) -> None:
        residual = self._residuals.get(layout)
        if residual is not None:
            bucket.add_(residual)
        elif self._carried:
            offset = 0
            for name, shape in layout:
                count = shape.numel()
                if name in self._carried:
                    bucket[offset : offset + count] += self._carried[name].view(-1)
                    self._carried_used.add(name)
                offset += count

    def begin_step(self, *, measure_norms: bool) -> None:
        """Start counting a new step; forgets whatever an unfinished step had staged."""
        # What is under way when its step ends counts in the step in which it ends.
        self.meter = StepMeter(intervals=self.meter.intervals)
        self.measure_norms = measure_norms
        self.discard_step()

    def discard_step(self) -> None:
        """Forget whatever the step has staged so far: its gradient is not to count."""
        self._staged.clear()
        self._carried_used.clear()
        if self._joint is not None:
            self._joint.begin_step()

    def commit_step(self) -> None:
        """The step is complete: what it left unsent is added to the next exchange of the same parameters.

        An exchange may still be under way then; what it leaves is complete once its future is.
        """
        for layout, unsent in self._staged.items():
            self._residuals.pop(layout, None)
            if unsent is not None:
                self._residuals[layout] = unsent
        self._staged.clear()
        for name in self._carried_used:
            del self._carried[name]
        self._carried_used.clear()
        if self._joint is not None:
            self._joint.commit_step()

    @property
    def _joint(self) -> JointCodec | None:
        codec = self.exchange.codec
        return codec if isinstance(codec, JointCodec) else None

    def codec_state(self) -> tuple[dict[str, Tensor], int]:
        """What the codec remembers from step to step, equal on all ranks, and over how many steps."""
        return self._joint.state() if self._joint is not None else ({}, 0)

    def load_codec_state(self, memory: "Mapping[str, Tensor]", steps: int) -> None:
        """Take over what `codec_state` of an averager with the same codec returned."""
        if self._joint is not None:
            self._joint.load_state(dict(memory), steps)

    @property
    def codec_name(self) -> str:
        """The codec's registered name."""
        return self.exchange.codec.name

    def residuals(self) -> dict[str, Tensor]:
        """What has not been sent yet, by parameter name, flat; independent of the bucket layout."""
        found = dict(self._carried)
        for layout, residual in self._residuals.items():
            pieces = residual.split([shape.numel() for _, shape in layout])
            found.update({name: piece for (name, _), piece in zip(layout, pieces, strict=True)})
        return found

    def carry(self, residuals: "Mapping[str, Tensor]") -> None:
        """Add these, by parameter name, to the next exchange of their parameters, whatever the codec."""
        self._carried = {name: residual.clone() for name, residual in residuals.items()}
