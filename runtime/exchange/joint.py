"""How a joint codec's bucket becomes its sum: a conversation over another exchange."""

import queue
import threading
from collections.abc import Generator

import torch
from torch import Tensor

from paceline.runtime.compress.base import Joint, JointCodec, Layout
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
        self.carrier = carrier
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
        self.carrier.release()
        super().release()

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        """Open the conversation, and hold it once those before it are over."""
        self._joint.note_exchange()
        conversation = self._joint.converse(bucket, layout, self.world_size)
        # Here, as by its turn the codec may count another step.
        opening = next(conversation)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.put((conversation, opening, bucket, unsent, meter, future))
        return future

    def _serve(self) -> None:
        while (item := self._buckets.get()) is not None:
            conversation, opening, bucket, unsent, meter, future = item
            try:
                total, share = self._hold(conversation, opening, meter)
                if unsent is not None:
                    unsent.add_(bucket).sub_(share)
                bucket.copy_(total)
                del total, share
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(bucket)
            # What waits for the next bucket must not keep this one alive.
            del item, conversation, opening, bucket, unsent, meter, future

    def _hold(self, conversation: "_Open", message: Tensor, meter: StepMeter) -> Joint:
        try:
            while True:
                message = conversation.send(self.carrier.start(message, (), None, meter).wait())
        except StopIteration as over:
            outcome: Joint = over.value
            return outcome


_Open = Generator[Tensor, Tensor, Joint]
_Item = tuple[_Open, Tensor, Tensor, Tensor | None, StepMeter, torch.futures.Future[Tensor]]
