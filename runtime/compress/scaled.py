"""Codecs that send every element in one byte, relative to the largest of its block."""

from abc import abstractmethod

import torch
from torch import Tensor

from paceline.runtime.compress.base import Payload
from paceline.runtime.compress.blocks import block_count, pieces
from paceline.runtime.compress.nonlinear import NonlinearCodec

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A smaller scale has no finite reciprocal. A block without an element as large comes out as zeros, or nearly."""


class ScaledCodec(NonlinearCodec):
    """Divides a block by a scale that makes its largest magnitude the largest that `dtype` holds.

    A block with an element that is not finite comes out without one that is.
    """

    dense = True
    faithful = True
    dtype: torch.dtype
    """Type of one byte that elements are sent in."""
    largest: float
    """The largest magnitude of `dtype` that is used."""

    @abstractmethod
    def _code(self, scaled: Tensor) -> Tensor:
        """What is nearest to these fp32 numbers from -largest to largest, any shape. May change them."""

    @abstractmethod
    def _value(self, codes: Tensor) -> Tensor:
        """The fp32 numbers that codes, of any shape, stand for."""

    def encode(self, bucket: Tensor) -> Payload:
        """Scales (fp32, one per block) and codes (`dtype`, shape [n])."""
        count = bucket.numel()
        scales = bucket.new_empty(block_count(count))
        codes = bucket.new_empty(count, dtype=self.dtype)
        for piece in pieces(count):
            block = piece.of(bucket)
            largest = torch.maximum(block.amax(1), block.amin(1).neg_())
            scale = largest.div_(self.largest).clamp_(min=SMALLEST_SCALE)
            scales[piece.blocks] = scale
            piece.of(codes).copy_(self._code(block * scale.reciprocal_().unsqueeze(1)))
        return scales, codes

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add code times scale."""
        scales, codes = payload
        for piece in pieces(out.numel()):
            piece.of(out).addcmul_(self._value(piece.of(codes)), scales[piece.blocks].unsqueeze(1))

    def payload_bytes(self, elements: int) -> int:
        """A byte for each element and four for each block."""
        return elements + block_count(elements) * torch.float32.itemsize
