"""A hierarchical all-reduce, pipelined in chunks, so that all tiers of the network work at once.

Every stage of the plan has a thread that takes the chunks in order: it waits for what arrives, adds it up, and sends
on. While one chunk crosses between racks, the next is being reduced inside them. Messages go directly between ranks, so
no process group per tier has to be made when the job changes.
"""

import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Layout
from paceline.runtime.exchange.base import PEER_TIMEOUT, RELEASE_SECONDS, Exchange
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.packing import Packing
from paceline.runtime.exchange.plan import Plan, Stage, Transfer
from paceline.runtime.mapping.levels import Level

FIRST_TAG = 1 << 16
"""Smaller tags are left to others who send on the same group."""
LAST_TAG = 1 << 30
AHEAD = 2
"""Chunks that the first stage may be ahead of its end. All at once would fill the queues of the network, and what the
slow tier is to carry next would wait behind them."""


class Tiers(Exchange):
    """Exchanges along nested groups of ranks."""

    def __init__(
        self,
        codec: BlockCodec,
        group: dist.ProcessGroup,
        tiers: Sequence[Level],
        plan: Plan,
        *,
        chunk_bytes: int,
        slow_only: bool = False,
        links: dist.ProcessGroup | None = None,
    ) -> None:
        """Exchange as planned, in chunks of about `chunk_bytes` of fp32 where the plan has use for them.

        With `slow_only` the codec applies to the outermost level alone; the others carry fp32.
        """
        super().__init__(codec, group, tiers, links=links)
        self._block = codec
        self._plan = plan
        self._chunk_elements = max(1, chunk_bytes // 4) if plan.pipelines else sys.maxsize
        self._coded_levels = range(self._plan.levels - 1 if slow_only else 0, self._plan.levels if codec.lossy else 0)
        self._packing = Packing(codec)
        self._tag = FIRST_TAG
        self._recent: deque[_Chunk] = deque(maxlen=AHEAD)
        stages = len(self._plan.stages)
        # One queue per stage, and one for what sets a chunk off.
        self._queues: list[queue.SimpleQueue[_Chunk | None]] = [queue.SimpleQueue() for _ in range(stages + 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True, name=f"exchange-{index}")
            for index in range(stages + 1)
        ]
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        """End the threads and let go of the group."""
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(RELEASE_SECONDS)
        super().release()

    def rewind(self) -> None:
        """Count messages anew. All ranks call it, while nothing is under way."""
        self._tag = FIRST_TAG

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Cut the bucket into chunks and set them off."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        cuts = _cuts(bucket.numel(), self._chunk_elements)
        flight = _Flight(bucket, future, len(cuts) - 1)
        for start, stop in pairwise(cuts):
            part = slice(start, stop)
            chunk = _Chunk(flight, bucket[part], None if unsent is None else unsent[part], self._tag, self._plan)
            if len(self._recent) == AHEAD:
                chunk.waits_for = self._recent[0].passed[min(1, len(self._plan.stages))]
            self._recent.append(chunk)
            self._tag += len(self._plan.stages)
            if self._tag > LAST_TAG:
                self._tag = FIRST_TAG
            self._count(chunk, meter)
            for each in self._queues:
                each.put(chunk)
        return future

    def _count(self, chunk: "_Chunk", meter: StepMeter) -> None:
        for stage in self._plan.stages:
            # Who takes part without being a rank reports nothing, so what comes from there is counted here.
            helped = [transfer for transfer in stage.receives if transfer.peer >= self.world_size]
            for transfer in (*stage.sends, *helped):
                start, stop = chunk.range_of(transfer)
                size = self._block.payload_bytes(stop - start) if self._codes(stage) else 4 * (stop - start)
                if start < stop:
                    meter.add_bytes(self.traffic_to(transfer.peer), size)

    def _codes(self, stage: Stage) -> bool:
        spares_sums = not (self._plan.feeds_back or self._block.faithful)
        return stage.level in self._coded_levels and not (spares_sums and not stage.reduces)

    def _serve(self, index: int) -> None:
        """Thread of stage `index` - 1; thread 0 only sets chunks off."""
        while (chunk := self._queues[index].get()) is not None:
            if index > 0:
                chunk.passed[index - 1].wait()
            try:
                if not chunk.failed:
                    self._pass(index, chunk)
            except Exception as error:
                chunk.fail(error)
            finally:
                chunk.passed[index].set()

    def _pass(self, index: int, chunk: "_Chunk") -> None:
        if index == 0:
            for each in range(len(self._plan.stages)):
                self._expect(each, chunk)
            if chunk.waits_for is not None:
                chunk.waits_for.wait()
        else:
            self._take(index - 1, chunk)
        if index < len(self._plan.stages):
            self._send(index, chunk)
        else:
            chunk.finish()

    def _expect(self, index: int, chunk: "_Chunk") -> None:
        """Post all receives of a stage. Gloo sends at once what is expected, and asks before it sends anything else."""
        stage = self._plan.stages[index]
        for transfer in stage.receives:
            start, stop = chunk.range_of(transfer)
            if start == stop:
                continue
            if self._codes(stage):
                landing = torch.empty(self._block.payload_bytes(stop - start), dtype=torch.uint8)
            else:
                landing = torch.empty(stop - start) if stage.reduces else chunk.part[start:stop]
            work = self.links.recv([landing], transfer.peer, chunk.tag + index)
            chunk.arrivals[index].append((work, landing, start, stop))

    def _take(self, index: int, chunk: "_Chunk") -> None:
        """Wait until everything of a stage has arrived, and take it in."""
        stage = self._plan.stages[index]
        for work, landing, start, stop in chunk.arrivals[index]:
            work.wait(PEER_TIMEOUT)
            here = chunk.part[start:stop]
            if self._codes(stage):
                if not stage.reduces:
                    here.zero_()
                self._block.decode(self._packing.unpack(landing, stop - start), here)
            elif stage.reduces:
                here.add_(landing)

    def _send(self, index: int, chunk: "_Chunk") -> None:
        stage = self._plan.stages[index]
        packed: dict[tuple[int, int], Tensor] = {}
        if self._codes(stage):
            # What is gathered is replaced by what its receivers decode even where nobody receives it, so that groups of
            # one end with the same bits as all others.
            ranges = [chunk.range_of(each) for each in stage.sends] if stage.reduces else chunk.ranges_of(stage.holds)
            packed = {(start, stop): self._encode(stage, chunk, start, stop) for start, stop in ranges if start < stop}
        for transfer in stage.sends:
            start, stop = chunk.range_of(transfer)
            if start == stop:
                continue
            message = packed[start, stop] if packed else chunk.part[start:stop]
            chunk.departures.append(self.links.send([message], transfer.peer, chunk.tag + index))

    def _encode(self, stage: Stage, chunk: "_Chunk", start: int, stop: int) -> Tensor:
        """What travels of a range. In an all-gather this rank, too, goes on with what the others decode."""
        here = chunk.part[start:stop]
        payload = self._block.encode(here)
        if chunk.unsent is not None or not stage.reduces:
            sent = torch.zeros_like(here)
            self._block.decode(payload, sent)
            if chunk.unsent is not None:
                self._keep(chunk, stage, here - sent, start)
            if not stage.reduces:
                here.copy_(sent)
        return self._packing.pack(payload)

    def _keep(self, chunk: "_Chunk", stage: Stage, dropped: Tensor, start: int) -> None:
        """Add what was dropped to what is sent later. In an all-gather every group drops the same, which one keeps."""
        assert chunk.unsent is not None
        if stage.reduces:
            chunk.unsent[start : start + len(dropped)] += dropped
            return
        for first, last in chunk.home:
            low, high = max(first, start), min(last, start + len(dropped))
            if low < high:
                chunk.unsent[low:high] += dropped[low - start : high - start]


def _cuts(count: int, chunk: int) -> list[int]:
    """Where to cut a bucket of `count` elements into chunks of about `chunk`.

    The first and the last are smaller: while they pass through the inner levels, the outer one has nothing to do.
    """
    if count <= chunk // 2:
        return [0, count]
    quarters = [1, 2, *[4] * max(0, round(count / chunk - 1.5)), 2, 1]
    return [count * passed // sum(quarters) for passed in accumulate([0, *quarters])]


class _Flight:
    """A bucket under way."""

    def __init__(self, bucket: Tensor, future: torch.futures.Future[Tensor], chunks: int) -> None:
        self._bucket = bucket
        self._future = future
        self._missing = chunks
        self._failed = False
        self._lock = threading.Lock()

    def land(self) -> None:
        """One more chunk is there. Only the last stage's thread calls this."""
        self._missing -= 1
        if self._missing == 0:
            self._future.set_result(self._bucket)

    def fail(self, error: Exception) -> None:
        """A chunk cannot get there, so `land` is never called for all of them."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self._future.set_exception(error)  # type: ignore[arg-type]


class _Chunk:
    """A part of a bucket under way."""

    def __init__(self, flight: _Flight, part: Tensor, unsent: Tensor | None, tag: int, plan: Plan) -> None:
        self._flight = flight
        self.part = part
        self.unsent = unsent
        self.tag = tag
        self._lanes = plan.lanes
        self.home = self.ranges_of(plan.home)
        self.arrivals: list[list[tuple[Any, Tensor, int, int]]] = [[] for _ in plan.stages]
        self.departures: list[Any] = []
        self.waits_for: threading.Event | None = None
        self.failed = False
        # Thread i is through with the chunk, so thread i + 1 may go on from what it left.
        self.passed = [threading.Event() for _ in range(len(plan.stages) + 1)]

    def range_of(self, transfer: Transfer) -> tuple[int, int]:
        """Half-open range of the chunk's elements that a transfer carries."""
        return self._elements(transfer.first, transfer.stop)

    def ranges_of(self, lanes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The same for ranges of lanes."""
        return [self._elements(first, stop) for first, stop in lanes]

    def _elements(self, first: int, stop: int) -> tuple[int, int]:
        count = self.part.numel()
        return first * count // self._lanes, stop * count // self._lanes

    def finish(self) -> None:
        """The last stage is through; what this rank has sent must be gone before the memory is the caller's again."""
        for work in self.departures:
            work.wait(PEER_TIMEOUT)
        self._flight.land()

    def fail(self, error: Exception) -> None:
        """Give the bucket up."""
        self.failed = True
        self._flight.fail(error)
