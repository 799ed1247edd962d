"""The mean of a flat bucket over all ranks, through a codec, counted and timed.

Sync modes exchange nothing by themselves: they hand buckets to a `BucketAverager`. It owns the residuals of error
feedback, which are staged and become effective only when the step is complete, so that a step that fails halfway
leaves no trace.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import Codec, Payload

if TYPE_CHECKING:
    from collections.abc import Mapping

Layout = tuple[tuple[str, int], ...]
"""Name and element count of each parameter in a bucket, in order."""


def all_reduce_bytes(payload: int, world_size: int, rank: int) -> int:
    """Bytes that `rank` sends in a ring all-reduce; over all ranks exactly 2(n-1) x payload."""
    return _part_of(2 * (world_size - 1) * payload, world_size, rank)


def all_gather_bytes(payload: int, world_size: int) -> int:
    """Bytes that one rank sends in a ring all-gather of a payload per rank."""
    return (world_size - 1) * payload


def _part_of(total: int, world_size: int, rank: int) -> int:
    return total // world_size + (rank < total % world_size)


@dataclass
class StepMeter:
    """What one rank exchanged during one step."""

    wire_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes sent by this rank, per tier."""
    intervals: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each exchange on the `time.perf_counter` clock, s."""
    local_square_norm: float = 0.0
    """|this rank's bucket|^2 summed over buckets, before averaging; where norms are measured."""
    mean_square_norm: float = 0.0
    """|mean bucket|^2 summed over buckets; where norms are measured."""

    def add_bytes(self, tier: str, count: int) -> None:
        """Count bytes sent by this rank on a tier."""
        self.wire_bytes[tier] = self.wire_bytes.get(tier, 0) + count

    def busy_seconds(self) -> float:
        """Seconds in which at least one exchange was under way."""
        busy, end = 0.0, 0.0
        for start, stop in sorted(self.intervals):
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return busy


class BucketAverager:
    """Averages buckets over a process group. Calls must come in the same order on all ranks."""

    def __init__(self, codec: Codec, group: dist.ProcessGroup, *, tier: str) -> None:
        self.codec = codec
        self._group: dist.ProcessGroup | None = group
        self.world_size = group.size()
        self.rank = group.rank()
        self.tier = tier
        self.meter = StepMeter()
        self.measure_norms = False
        self._residuals: dict[Layout, Tensor] = {}
        self._staged: dict[Layout, Tensor] = {}
        self._carried: dict[str, Tensor] = {}
        self._carried_used: set[str] = set()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that are averaged over."""
        assert self._group is not None, "the averager was released"
        return self._group

    def release(self) -> None:
        """Let go of the group. An exchange that never ends keeps the averager alive, and must not keep the group."""
        self._group = None

    @property
    def needs_layout(self) -> bool:
        """Whether `start` looks at the layout: there are residuals to add or to keep."""
        return self.codec.error_feedback or bool(self._carried) or bool(self._residuals)

    def start(self, bucket: Tensor, layout: Layout) -> torch.futures.Future[Tensor]:
        """Average a flat fp32 bucket that the caller gives up; the future holds the mean, of the same shape."""
        began = time.perf_counter()
        if self.measure_norms:
            self.meter.local_square_norm += float(bucket.square().sum())
        self._add_residual(bucket, layout)
        # Dividing before encoding keeps the sum of large fp16 gradients finite.
        bucket.div_(self.world_size)
        payload = self.codec.encode(bucket)
        if self.codec.error_feedback:
            sent = torch.zeros_like(bucket)
            self.codec.decode(payload, sent)
            self._staged[layout] = (bucket - sent).mul_(self.world_size)
        future = self._reduce(payload) if self.codec.linear else self._gather(payload)
        # Gloo's own thread runs and drops this, and must not be the one that drops the group: nothing here holds it.
        codec, meter, measure_norms = self.codec, self.meter, self.measure_norms

        def finish(done: torch.futures.Future[Any]) -> Tensor:
            mean = _decode(codec, done.value(), payload, bucket)
            if measure_norms:
                meter.mean_square_norm += float(mean.square().sum())
            meter.intervals.append((began, time.perf_counter()))
            return mean

        return future.then(finish)

    def _reduce(self, payload: Payload) -> torch.futures.Future[Any]:
        (tensor,) = payload
        size = tensor.numel() * tensor.element_size()
        self.meter.add_bytes(self.tier, all_reduce_bytes(size, self.world_size, self.rank))
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        reduced: torch.futures.Future[Any] = work.get_future()
        return reduced

    def _gather(self, payload: Payload) -> torch.futures.Future[Any]:
        packed = torch.cat([tensor.view(torch.uint8) for tensor in payload])
        self.meter.add_bytes(self.tier, all_gather_bytes(packed.numel(), self.world_size))
        gathered = [torch.empty_like(packed) for _ in range(self.world_size)]
        work = dist.all_gather(gathered, packed, group=self.group, async_op=True)
        everything: torch.futures.Future[Any] = work.get_future().then(lambda _: gathered)
        return everything

    def _add_residual(self, bucket: Tensor, layout: Layout) -> None:
        residual = self._residuals.get(layout)
        if residual is not None:
            bucket.add_(residual)
        elif self._carried:
            offset = 0
            for name, count in layout:
                if name in self._carried:
                    bucket[offset : offset + count] += self._carried[name].view(-1)
                    self._carried_used.add(name)
                offset += count

    def begin_step(self, *, measure_norms: bool) -> None:
        """Start counting a new step; forgets whatever an unfinished step had staged."""
        self.meter = StepMeter()
        self.measure_norms = measure_norms
        self._staged.clear()
        self._carried_used.clear()

    def commit_step(self) -> None:
        """The step is complete: what it left unsent is added to the next one."""
        self._residuals.update(self._staged)
        self._staged.clear()
        for name in self._carried_used:
            del self._carried[name]
        self._carried_used.clear()

    def residuals(self) -> dict[str, Tensor]:
        """What has not been sent yet, by parameter name, flat; independent of the bucket layout."""
        found = dict(self._carried)
        for layout, residual in self._residuals.items():
            pieces = residual.split([count for _, count in layout])
            found.update({name: piece for (name, _), piece in zip(layout, pieces, strict=True)})
        return found

    def carry(self, residuals: "Mapping[str, Tensor]") -> None:
        """Add these, by parameter name, to the next exchange of their parameters, whatever the codec."""
        self._carried = {name: residual.clone() for name, residual in residuals.items()}


def _decode(codec: Codec, received: Any, payload: Payload, bucket: Tensor) -> Tensor:
    if codec.linear:
        (reduced,) = payload
        if reduced.data_ptr() == bucket.data_ptr():
            return bucket
        bucket.zero_()
        codec.decode((reduced,), bucket)
        return bucket
    bucket.zero_()
    sizes = [tensor.numel() * tensor.element_size() for tensor in payload]
    # Every rank decodes in rank order, so all of them get the same bits.
    for packed in received:
        pieces = packed.split(sizes)
        unpacked = tuple(piece.view(tensor.dtype) for piece, tensor in zip(pieces, payload, strict=True))
        codec.decode(unpacked, bucket)
    return bucket
