"""How a joint codec's bucket becomes its sum: a conversation over another exchange."""

import queue
import threading

import torch
from torch import Tensor

from paceline.runtime.compress.base import JointCodec, Layout
from paceline.runtime.exchange.base import RELEASE_SECONDS, Exchange
from paceline.runtime.exchange.meter import StepMeter


class Conversation(Exchange):
    """Sums what a `JointCodec` asks to have summed, by an exchange that changes nothing.

    One thread holds all conversations, one after the other: sums must be asked for in the same order on all ranks,
    and the order in which they come in differs from rank to rank.
    """

    def __init__(self, codec: JointCodec, carrier: Exchange) -> None:
        """`carrier` is this object's to release."""
        super().__init__(codec, carrier.group, carrier.tiers)
        self._joint = codec
        self._carrier = carrier
        self._buckets: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="conversation")
        self._thread.start()

    @property
    def needs_layout(self) -> bool:
        """True: parameters are encoded one by one."""
        return True

    def release(self) -> None:
        """End the thread and let go of the group."""
        self._buckets.put(None)
        self._thread.join(RELEASE_SECONDS)
        self._carrier.release()
        super().release()

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Hold the conversation once those before it are over."""
        self._joint.note_exchange()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.put((bucket, layout, unsent, meter, future))
        return future

    def _serve(self) -> None:
        while (item := self._buckets.get()) is not None:
            bucket, layout, unsent, meter, future = item
            try:
                self._converse(bucket, layout, unsent, meter)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(bucket)
            # What waits for the next bucket must not keep this one alive.
            del item, bucket, layout, unsent, meter, future

    def _converse(self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter) -> None:
        conversation = self._joint.converse(bucket, layout, self.world_size)
        try:
            message = next(conversation)
            while True:
                message = conversation.send(self._carrier.start(message, (), None, meter).wait())
        except StopIteration as over:
            total, share = over.value
        if unsent is not None:
            unsent.add_(bucket).sub_(share)
        bucket.copy_(total)


_Item = tuple[Tensor, Layout, Tensor | None, StepMeter, torch.futures.Future[Tensor]]
