"""What a codec is."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from paceline.runtime.knobs import KnobConfig, NoKnobs
from paceline.runtime.registry import Registry

Payload = tuple[Tensor, ...]


class Codec(ABC):
    """Turns a flat fp32 bucket into what travels, and back. Stateless: residuals belong to the `BucketAverager`."""

    name: ClassVar[str]
    Config: ClassVar[type[KnobConfig]] = NoKnobs
    linear: ClassVar[bool]
    """Whether payloads of the ranks may be summed on the wire (all-reduce); if not, all are gathered."""
    lossy: ClassVar[bool]
    """Whether decode(encode(x)) differs from x, so that error feedback can help."""

    def __init__(self, config: KnobConfig) -> None:
        """Configs are validated dataclasses; codecs with knobs narrow the type."""

    @property
    def error_feedback(self) -> bool:
        """Whether what encoding dropped is added to the next bucket (Karimireddy et al., arXiv:1901.09847)."""
        return False

    @abstractmethod
    def encode(self, bucket: Tensor) -> Payload:
        """Encode a flat fp32 tensor of n elements. Must not change `bucket`. Linear codecs return one tensor."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor) -> None:
        """ADD the decoded payload to the flat fp32 tensor `out` of n elements."""

    @abstractmethod
    def payload_bytes(self, elements: int) -> int:
        """Bytes of the payload of a bucket of so many elements: the formula the wire is checked against."""


CODECS: Registry[type[Codec]] = Registry(
    "codec", package="paceline.runtime.compress", entry_point_group="paceline.codecs"
)
