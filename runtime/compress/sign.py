"""One bit per element on the wire."""

import torch
from torch import Tensor
from torch.nn import functional

from paceline.runtime.compress.base import CODECS, Payload
from paceline.runtime.compress.blocks import block_count, pieces
from paceline.runtime.compress.nonlinear import NonlinearCodec

# Multiplied with eight bytes that are 0 or 1, it gathers them in the highest byte, the first one as the lowest bit.
GATHER = 0x0102040810204080


@CODECS.register
class Sign(NonlinearCodec):
    """The sign of every element, times the mean magnitude of its block of B = 256.

    Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847). A contraction: of a block x of d elements,
    |x - decode(encode(x))|^2 = |x|^2 - |x|_1^2 / d, which is 0 if all magnitudes are equal, about (1 - 2/pi) |x|^2 if
    they are normally distributed, and never more than (1 - 1/B) |x|^2. Zero counts as positive. A block with an element
    that is not finite comes out without one that is.
    """

    name = "sign"
    dense = True

    def encode(self, bucket: Tensor) -> Payload:
        """Scales (fp32, one per block) and signs (uint8, eight elements each, the first in the lowest bit)."""
        count = bucket.numel()
        scales = bucket.new_empty(block_count(count))
        signs = bucket.new_empty(_bytes(count), dtype=torch.uint8)
        for piece in pieces(count):
            block = piece.of(bucket)
            scales[piece.blocks] = block.abs().mean(1)
            signs[_bytes_of(piece.elements)] = _pack((block >= 0).view(-1))
        return scales, signs

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add the scale where the bit is set, and subtract it elsewhere."""
        scales, signs = payload
        for piece in pieces(out.numel()):
            part = piece.of(out)
            unpacked = _unpack(signs[_bytes_of(piece.elements)])[: part.numel()].view_as(part)
            part.addcmul_(unpacked, scales[piece.blocks].unsqueeze(1))

    def payload_bytes(self, elements: int) -> int:
        """A bit for each element, rounded up to whole bytes, and four bytes for each block."""
        return _bytes(elements) + block_count(elements) * torch.float32.itemsize


def _bytes(elements: int) -> int:
    return -(-elements // 8)


def _bytes_of(elements: slice) -> slice:
    return slice(elements.start // 8, _bytes(elements.stop))


def _pack(bits: Tensor) -> Tensor:
    eights = functional.pad(bits, (0, -len(bits) % 8)).view(torch.int64)
    return ((eights * GATHER) >> 56).to(torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    return _SIGNS.to(packed.device).index_select(0, packed.int()).view(-1)


_SIGNS = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).float() * 2 - 1
"""The eight signs that a byte stands for, [256, 8]."""
