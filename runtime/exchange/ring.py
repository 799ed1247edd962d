"""One flat exchange over all ranks: a ring."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Layout, Payload
from paceline.runtime.exchange.base import Exchange
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.packing import Packing
from paceline.runtime.mapping.levels import Level


def all_reduce_bytes(payload: int, world_size: int, rank: int) -> int:
    """Bytes that `rank` sends in a ring all-reduce; over all ranks exactly 2(n-1) x payload."""
    return _part_of(2 * (world_size - 1) * payload, world_size, rank)


def all_gather_bytes(payload: int, world_size: int) -> int:
    """Bytes that one rank sends in a ring all-gather of a payload per rank."""
    return (world_size - 1) * payload


def _part_of(total: int, world_size: int, rank: int) -> int:
    return total // world_size + (rank < total % world_size)


class Ring(Exchange):
    """All-reduce where the codec's payloads can be summed on the wire, else all-gather."""

    def __init__(self, codec: BlockCodec, group: dist.ProcessGroup, tiers: Sequence[Level]) -> None:
        super().__init__(codec, group, tiers)
        self._block = codec
        self._packing = Packing(codec)

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Encode, and exchange the payload."""
        codec, packing = self._block, self._packing
        payload = codec.encode(bucket)
        if unsent is not None:
            sent = torch.zeros_like(bucket)
            codec.decode(payload, sent)
            unsent.add_(bucket).sub_(sent)
        future = self._reduce(payload, meter) if codec.linear else self._gather(payload, meter)
        # Gloo's own thread runs and drops this, and must not be the one that drops the group: nothing here holds it.
        return future.then(lambda done: _decode(codec, packing, done.value(), payload, bucket))

    def _reduce(self, payload: Payload, meter: StepMeter) -> torch.futures.Future[Any]:
        (tensor,) = payload
        size = tensor.numel() * tensor.element_size()
        meter.add_bytes(self.traffic_to_next, all_reduce_bytes(size, self.world_size, self.rank))
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        reduced: torch.futures.Future[Any] = work.get_future()
        return reduced

    def _gather(self, payload: Payload, meter: StepMeter) -> torch.futures.Future[Any]:
        packed = self._packing.pack(payload)
        meter.add_bytes(self.traffic_to_next, all_gather_bytes(packed.numel(), self.world_size))
        gathered = [torch.empty_like(packed) for _ in range(self.world_size)]
        work = dist.all_gather(gathered, packed, group=self.group, async_op=True)
        everything: torch.futures.Future[Any] = work.get_future().then(lambda _: gathered)
        return everything


def _decode(codec: BlockCodec, packing: Packing, received: Any, payload: Payload, bucket: Tensor) -> Tensor:
    if codec.linear:
        (reduced,) = payload
        if reduced.data_ptr() == bucket.data_ptr():
            return bucket
        bucket.zero_()
        codec.decode((reduced,), bucket)
        return bucket
    bucket.zero_()
    # Every rank decodes in rank order, so all of them get the same bits.
    for packed in received:
        codec.decode(packing.unpack(packed, bucket.numel()), bucket)
    return bucket
