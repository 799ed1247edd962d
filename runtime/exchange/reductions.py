"""Buckets that are summed by processes which do not train.

Each reducer sums one lane of every bucket. A worker thus sends its bucket once and receives the sum once, where a ring
of n sends and receives 2 (n - 1) / n times as much. A chunk is returned as soon as it is complete, while the next ones
arrive. Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous
GPU/CPU Clusters" (BytePS), OSDI 2020.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Layout
from paceline.runtime.exchange.base import PEER_TIMEOUT
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.plan import make_reducer_plan
from paceline.runtime.exchange.tiers import Tiers
from paceline.runtime.membership import Membership

ANNOUNCEMENT_TAG = 1 << 15
END = -1


class ReductionClient(Tiers):
    """A rank's end."""

    def __init__(self, codec: BlockCodec, membership: Membership, *, chunk_bytes: int) -> None:
        plan = make_reducer_plan(membership.world_size, membership.reducers, membership.rank)
        super().__init__(
            codec, membership.group, membership.tiers, plan, chunk_bytes=chunk_bytes, links=membership.links
        )

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Announce the bucket and set it off."""
        self._announce(bucket.numel())
        return super().start(bucket, layout, unsent, meter)

    def end(self) -> None:
        """Tell the reducers that nothing follows until the next run."""
        self._announce(END)
        # The reducers count anew with every run.
        self.rewind()

    def _announce(self, elements: int) -> None:
        if self.rank == 0:
            message = torch.tensor([elements])
            reducers = range(self.world_size, self.links.size())
            for work in [self.links.send([message], reducer, ANNOUNCEMENT_TAG) for reducer in reducers]:
                work.wait(PEER_TIMEOUT)


def reduce_for(codec: BlockCodec, links: dist.ProcessGroup, ranks: int, *, chunk_bytes: int) -> None:
    """Be one of the reducers, which are the ranks of `links` behind the first `ranks`, for one run.

    Raises RuntimeError when a peer is lost.
    """
    plan = make_reducer_plan(ranks, links.size() - ranks, links.rank())
    exchange = Tiers(codec, links, (), plan, chunk_bytes=chunk_bytes)
    announced = torch.empty(1, dtype=torch.int64)
    sums: list[torch.futures.Future[Tensor]] = []
    try:
        while True:
            links.recv([announced], 0, ANNOUNCEMENT_TAG).wait(PEER_TIMEOUT)
            if int(announced) == END:
                for each in sums:
                    each.wait()
                return
            sums = [each for each in sums if not each.done()]
            sums.append(exchange.start(torch.zeros(int(announced)), (), None, StepMeter()))
    finally:
        exchange.release()
