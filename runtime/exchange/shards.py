"""Parameters in shards, one at each rank, to which all ranks push gradients and from which they pull.

Between two barriers each rank serves every peer with a thread, and talks to all of them with two of its own, one that
pushes and one that pulls.
A request is a header of four numbers: what is asked for, and the step, part and version that it is about.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Layout
from paceline.runtime.exchange.base import PEER_TIMEOUT, RELEASE_SECONDS, Exchange
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.packing import Packing
from paceline.runtime.mapping.levels import Level

T = TypeVar("T")

PUSH, PULL, BYE = range(3)
REQUEST_TAG, PUSHED_TAG, VERSION_TAG, PULLED_TAG = range(1 << 14, (1 << 14) + 4)

RELEASED = "the shards were released"

Update = Callable[[Tensor, float], Tensor]
"""Applies the mean gradient of a step, given the mean staleness of its parts; returns a copy of the new parameters."""


class Shard:
    """The parameters that one rank keeps for all, and the updates they have had. Safe to use from many threads."""

    def __init__(self, values: Tensor, *, parts: int, lateness: int, version: int, update: Update) -> None:
        """`values` are the flat parameters after `version` updates, each with `parts` gradients; that of a part of step
        t is in update t + `lateness` at the latest."""
        self._values = values
        self._parts = parts
        self._lateness = lateness
        self._version = version
        self._update = update
        self._waiting: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._missing: dict[int, int] = {}
        self._complete = version
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def push(self, step: int, part: int, read: int, gradient: Tensor) -> None:
        """Take the gradient of a part of a step, made with parameters of version `read`.

        As soon as `parts` gradients wait, whoever made them, they are applied, unless one of an earlier step is due.
        """
        with self._changed:
            self._waiting[step, part] = (read, gradient)
            self._missing[step] = self._missing.get(step, self._parts) - 1
            while self._missing.get(self._complete + 1) == 0:
                self._complete += 1
                del self._missing[self._complete]
            while len(self._waiting) >= self._parts and self._complete >= self._version + 1 - self._lateness:
                # The oldest first, and always added in the same order: without lateness the sum has the same bits.
                reads, gradients = zip(
                    *(self._waiting.pop(key) for key in sorted(self._waiting)[: self._parts]), strict=True
                )
                total = gradients[0]
                for other in gradients[1:]:
                    total.add_(other)
                self._values = self._update(total, self._version - sum(reads) / self._parts)
                self._version += 1
            self._changed.notify_all()

    def pull(self, version: int) -> tuple[int, Tensor]:
        """Version and values of the parameters, once the version is at least this. The values never change."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= version or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._version, self._values

    @property
    def error(self) -> BaseException | None:
        """What `fail` was told first."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Nothing more will come: whoever waits, or comes to wait, gets the error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class Shards(Exchange):
    """Buckets, one per shard, go to the rank that keeps the shard; what comes back is not their sum but, on request,
    the parameters that they have changed."""

    def __init__(self, codec: BlockCodec, group: dist.ProcessGroup, tiers: Sequence[Level]) -> None:
        super().__init__(codec, group, tiers)
        self._block = codec
        self._packing = Packing(codec)
        self._owners: dict[Layout, int] = {}
        self._sizes: list[int] = []
        self._shard: Shard | None = None
        self._label = (0, 0, 0)
        self._served = StepMeter()
        self._served_lock = threading.Lock()
        self._client = ThreadPoolExecutor(1, thread_name_prefix="shards-client")
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="shards-puller")
        self._pull_seconds = 0.0
        self._released = threading.Event()
        self._servers = ThreadPoolExecutor(max(1, self.world_size), thread_name_prefix="shards-server")
        self._serving: set[Future[None]] = set()

    @property
    def needs_layout(self) -> bool:
        """True: it names the shard."""
        return True

    def keep(self, layouts: Sequence[Layout], shard: Shard) -> None:
        """Say what is in the shard of each rank, by rank, and hand over this rank's own."""
        self._owners = {layout: rank for rank, layout in enumerate(layouts) if layout}
        self._sizes = [sum(shape.numel() for _, shape in layout) for layout in layouts]
        self._shard = shard

    @property
    def own(self) -> Shard:
        """This rank's shard."""
        assert self._shard is not None, "call keep first"
        return self._shard

    def set_out(self) -> None:
        """Begin to serve. Every rank calls it."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        self._serving = {self._servers.submit(self._serve, self.group, peer) for peer in peers}

    def label(self, step: int, part: int, read: int) -> None:
        """What the next buckets are gradients of: a part of a step, made with parameters of version `read`."""
        self._label = (step, part, read)

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Push a bucket to the rank that keeps its shard; the future tells when it is gone."""
        payload, owner = self._block.encode(bucket), self._owners[layout]
        if unsent is not None:
            sent = torch.zeros_like(bucket)
            self._block.decode(payload, sent)
            unsent.add_(bucket).sub_(sent)
        packed = self._packing.pack(payload)
        gone: torch.futures.Future[Tensor] = torch.futures.Future()
        works: list[Any] = []
        if owner != self.rank:
            meter.add_bytes(self.traffic_to(owner), packed.numel())
            header = torch.tensor([PUSH, *self._label])
            works = [self.group.send([header], owner, REQUEST_TAG), self.group.send([packed], owner, PUSHED_TAG)]

        label = self._label

        def finish() -> None:
            try:
                if owner == self.rank:
                    self._take(packed, *label)
                for work in works:
                    work.wait(PEER_TIMEOUT)
            except Exception as error:
                self.own.fail(error)
                gone.set_exception(error)  # type: ignore[arg-type]
            else:
                gone.set_result(bucket)

        self._client.submit(finish)
        return gone

    def settle(self, pushes: Sequence[torch.futures.Future[Tensor]]) -> None:
        """Wait until buckets are gone. Raises what went wrong, of its own type, which torch's futures do not keep."""
        try:
            for push in pushes:
                push.wait()
        except Exception as error:
            raise self.own.error or error from None

    def pull(self, version: int) -> "Future[list[tuple[int, Tensor]]]":
        """Ask for all shards, each once its version is at least this: their versions and values, by rank."""
        return self._puller.submit(self._pull, self.group, version)

    def pull_ahead(self, busy_seconds: float) -> "Future[list[tuple[int, Tensor]]]":
        """Ask for all shards as they are, so late that the answer comes when so many seconds are over, but not later:
        twice the time that it took last is allowed for it."""
        return self._puller.submit(self._pull_ahead, self.group, busy_seconds)

    def result(self, future: "Future[T]") -> T:
        """Wait for a future. Raises what ended the serving of a peer, should that come first."""
        waiting: set[Future[Any]] = {future, *self._serving}
        while not future.done():
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()
        return future.result()

    def served(self) -> StepMeter:
        """What was sent to peers that pulled, since the last call."""
        with self._served_lock:
            served, self._served = self._served, StepMeter()
        return served

    def arrive(self) -> None:
        """Stop serving once no peer asks for anything. Every rank calls it, when it has all that it wants."""
        self._bid_farewell()
        for future in self._serving:
            future.result()
        self._serving = set()

    def _bid_farewell(self) -> None:
        farewell = torch.tensor([BYE, 0, 0, 0])
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        for work in [self.group.send([farewell], peer, REQUEST_TAG) for peer in peers]:
            work.wait(PEER_TIMEOUT)

    def release(self) -> None:
        """End the threads and let go of the group."""
        if self._shard is not None:
            self._shard.fail(RuntimeError(RELEASED))
        self._released.set()
        wait(self._serving, timeout=RELEASE_SECONDS)
        self._puller.shutdown(wait=False, cancel_futures=True)
        self._client.shutdown(wait=False, cancel_futures=True)
        self._servers.shutdown(wait=False, cancel_futures=True)
        super().release()

    def _pull_ahead(self, group: dist.ProcessGroup, busy_seconds: float) -> list[tuple[int, Tensor]]:
        if self._released.wait(max(0.0, busy_seconds - 2 * self._pull_seconds)):
            raise RuntimeError(RELEASED)
        began = time.perf_counter()
        replies = self._pull(group, 0)
        self._pull_seconds = time.perf_counter() - began
        return replies

    def _pull(self, group: dist.ProcessGroup, version: int) -> list[tuple[int, Tensor]]:
        request = torch.tensor([PULL, 0, 0, version])
        replies: list[tuple[Tensor, Tensor]] = []
        works = []
        for owner, size in enumerate(self._sizes):
            replies.append((torch.zeros(1, dtype=torch.int64), torch.empty(size)))
            if size and owner != self.rank:
                found, values = replies[owner]
                works.append(group.send([request], owner, REQUEST_TAG))
                works.append(group.recv([found], owner, VERSION_TAG))
                works.append(group.recv([values], owner, PULLED_TAG))
        if self._sizes[self.rank]:
            own_version, own_values = self.own.pull(version)
            replies[self.rank] = (torch.tensor([own_version]), own_values)
        for work in works:
            work.wait(PEER_TIMEOUT)
        return [(int(found), values) for found, values in replies]

    def _serve(self, group: dist.ProcessGroup, peer: int) -> None:
        try:
            header = torch.empty(4, dtype=torch.int64)
            while True:
                group.recv([header], peer, REQUEST_TAG).wait(PEER_TIMEOUT)
                kind, step, part, version = header.tolist()
                if kind == BYE:
                    return
                if kind == PUSH:
                    packed = torch.empty(self._block.payload_bytes(self._sizes[self.rank]), dtype=torch.uint8)
                    group.recv([packed], peer, PUSHED_TAG).wait(PEER_TIMEOUT)
                    self._take(packed, step, part, version)
                else:
                    self._reply(group, peer, version)
        except BaseException as error:
            self.own.fail(error)
            raise

    def _take(self, packed: Tensor, step: int, part: int, read: int) -> None:
        gradient = torch.zeros(self._sizes[self.rank])
        self._block.decode(self._packing.unpack(packed, len(gradient)), gradient)
        self.own.push(step, part, read, gradient)

    def _reply(self, group: dist.ProcessGroup, peer: int, version: int) -> None:
        found, values = self.own.pull(version)
        with self._served_lock:
            self._served.add_bytes(self.traffic_to(peer), 4 * len(values))
        for work in [
            group.send([torch.tensor([found])], peer, VERSION_TAG),
            group.send([values], peer, PULLED_TAG),
        ]:
            work.wait(PEER_TIMEOUT)
