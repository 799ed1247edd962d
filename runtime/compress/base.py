"""What a codec is."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.runtime.domain.knobs import Rule
from paceline.runtime.knobs import KnobConfig, NoKnobs
from paceline.runtime.registry import Registry

Payload = tuple[Tensor, ...]

Layout = tuple[tuple[str, torch.Size], ...]
"""Name and shape of each parameter in a bucket, in order."""


class Codec(ABC):
    """Decides what travels instead of a flat fp32 bucket."""

    name: ClassVar[str]
    Config: ClassVar[type[KnobConfig]] = NoKnobs
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What it does not go together with."""
    lossy: ClassVar[bool]
    """Whether what arrives differs from what was to be sent, so that error feedback can help."""

    def __init__(self, config: KnobConfig) -> None:
        """Configs are validated dataclasses; codecs with knobs narrow the type."""

    @property
    def error_feedback(self) -> bool:
        """Whether what encoding dropped is added to the next bucket (Karimireddy et al., arXiv:1901.09847)."""
        return False

    @abstractmethod
    def bucket_bytes(self, shapes: Iterable[torch.Size]) -> int:
        """Bytes of what a rank sends of a bucket of parameters of these shapes, once."""


class BlockCodec(Codec):
    """Encodes any stretch of elements by itself. Stateless: residuals belong to the `BucketAverager`."""

    linear: ClassVar[bool]
    """Whether payloads of the ranks may be summed on the wire (all-reduce); if not, they must be decoded first."""

    faithful: ClassVar[bool] = False
    """Whether every element arrives to within a rounding error, so that a sum may be encoded where no error feedback
    makes good what that drops."""

    @property
    def sums_at_owners(self) -> bool:
        """How a flat exchange adds up. True: each rank decodes and sums its part of the bucket in fp32 and sends the
        sum, encoded again, to all. False: all payloads reach every rank, summed on the wire if they are `linear`."""
        return False

    @abstractmethod
    def encode(self, bucket: Tensor) -> Payload:
        """Encode a flat fp32 tensor of n elements. Must not change `bucket`. Linear codecs return one tensor."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor) -> None:
        """ADD the decoded payload to the flat fp32 tensor `out` of n elements."""

    @abstractmethod
    def payload_bytes(self, elements: int) -> int:
        """Bytes of the payload of so many elements: the formula the wire is checked against."""

    def bucket_bytes(self, shapes: Iterable[torch.Size]) -> int:
        """As `payload_bytes`; shapes do not matter."""
        return self.payload_bytes(sum(shape.numel() for shape in shapes))


class Joint(NamedTuple):
    """What became of a bucket that was encoded jointly; flat fp32 tensors of its length."""

    total: Tensor
    """The decoded sum over all ranks."""
    share: Tensor
    """What of this rank's bucket is in the sum; the rest was left unsent."""


class JointCodec(Codec):
    """Encodes a bucket in agreement with the other ranks, so that what they send can be added up on the wire.

    What it learns during a step counts only once that step is complete. It is then the same on all ranks.
    """

    def __init__(self, config: KnobConfig) -> None:
        super().__init__(config)
        self.steps = 0
        """Complete steps with an exchange."""
        self._memory: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}
        self._exchanged = False
        self._unfinished = False

    @abstractmethod
    def converse(self, bucket: Tensor, layout: Layout, world_size: int) -> Generator[Tensor, Tensor, Joint]:
        """Yield each fp32 tensor that is to be summed over all ranks, and get the sum back; return the outcome.

        Both belong to whoever gets them. Must not change `bucket`. What is read of `steps` and of what was remembered
        must be read before the first is yielded: later on the next step may have begun.
        """

    def recall(self, name: str) -> Tensor | None:
        """What the last complete step remembered under a name."""
        return self._memory.get(name)

    def remember(self, name: str, value: Tensor) -> None:
        """Keep a tensor, equal on all ranks, for the steps after this one."""
        self._staged[name] = value

    def begin_step(self) -> None:
        """Forget whatever an unfinished step wanted to remember."""
        if self._unfinished:
            self._staged.clear()
        self._unfinished = True
        self._exchanged = False

    def note_exchange(self) -> None:
        """A bucket is exchanged in this step."""
        self._exchanged = True

    def commit_step(self) -> None:
        """The step is complete. What an exchange that is still under way remembers counts after the next one."""
        while self._staged:
            name, value = self._staged.popitem()
            self._memory[name] = value
        self.steps += self._exchanged
        self._unfinished = self._exchanged = False

    def state(self) -> tuple[dict[str, Tensor], int]:
        """What it remembers, and `steps`."""
        return self._memory, self.steps

    def load_state(self, memory: dict[str, Tensor], steps: int) -> None:
        """Take over what `state` returned on any rank."""
        self._memory = {name: value.clone() for name, value in memory.items()}
        self.steps = steps


CODECS: Registry[type[Codec]] = Registry(
    "codec", package="paceline.runtime.compress", entry_point_group="paceline.codecs"
)
