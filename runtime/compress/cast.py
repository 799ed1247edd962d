"""Codecs that only change the number format."""

from typing import ClassVar

import torch
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Payload


class CastCodec(BlockCodec):
    """Sends every element in `dtype`. One tensor, which the ranks may sum by all-reduce.

    The same as PyTorch's `fp16_compress_hook` and `bf16_compress_hook`
    (torch.distributed.algorithms.ddp_comm_hooks.default_hooks), in the form that every sync mode can use.
    """

    dtype: ClassVar[torch.dtype]
    linear = True

    def encode(self, bucket: Tensor) -> Payload:
        """One tensor of shape [n]. In fp32 it is `bucket` itself: reduce in place only what you own."""
        return (bucket.to(self.dtype),)

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add the payload to `out`, in fp32."""
        out.add_(payload[0])

    def payload_bytes(self, elements: int) -> int:
        """The element size of `dtype` for each element."""
        return elements * self.dtype.itemsize
