"""Eight-bit integers on the wire."""

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS
from paceline.runtime.compress.scaled import ScaledCodec


@CODECS.register
class Int8(ScaledCodec):
    """Multiples of 1/127 of the largest magnitude of a block of B = 256, to the nearest.

    Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (arXiv:1511.04561), with linear steps and a scale
    per block. Every error is at most half a step, so the codec is a contraction:
    |x - decode(encode(x))|^2 <= B/254^2 |x|^2.
    """

    name = "int8"
    dtype = torch.int8
    largest = 127.0

    def _code(self, scaled: Tensor) -> Tensor:
        return scaled.round_()

    def _value(self, codes: Tensor) -> Tensor:
        return codes.float()
