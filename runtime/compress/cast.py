"""Codecs that only change the number format."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Payload
from paceline.runtime.compress.configs import OWN_FORM
from paceline.runtime.domain.domains import Categorical
from paceline.runtime.domain.knobs import Rule
from paceline.runtime.knobs import KnobConfig, knob


class CastCodec(BlockCodec):
    """Sends every element in `dtype`. One tensor, which the ranks may sum by all-reduce.

    The same as PyTorch's `fp16_compress_hook` and `bf16_compress_hook`
    (torch.distributed.algorithms.ddp_comm_hooks.default_hooks), in the form that every sync mode can use.
    """

    dtype: ClassVar[torch.dtype]
    linear = True
    faithful = True

    def encode(self, bucket: Tensor) -> Payload:
        """One tensor of shape [n]. In fp32 it is `bucket` itself: reduce in place only what you own."""
        return (bucket.to(self.dtype),)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add the payload to `out`, in fp32."""
        out.add_(payload[0])

    def payload_bytes(self, elements: int) -> int:
        """The element size of `dtype` for each element."""
        return elements * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class HalfConfig(KnobConfig):
    """The knob of formats that are too short to sum in without loss."""

    reduce: str = knob("precision.reduce", Categorical(choices=("wire", "fp32")), default="wire")
    """What a flat exchange sums in: `wire`, the codec's format, rounding at every rank; or `fp32`, in which one rank
    sums each part of a bucket and the sum is rounded once."""


class HalfCodec(CastCodec):
    """Sends every element in half the width."""

    Config = HalfConfig
    lossy = True
    rules = (
        Rule(
            knob="sync.mode",
            values=OWN_FORM,
            other="precision.reduce",
            allowed=("wire",),
            because="the mode sums in fp32 in any case",
        ),
    )

    def __init__(self, config: HalfConfig) -> None:
        self._reduce = config.reduce

    @property
    def sums_at_owners(self) -> bool:
        """As `precision.reduce` says."""
        return self._reduce == "fp32"
