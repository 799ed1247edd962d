"""Top-k sparsification."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS, Payload
from paceline.runtime.compress.blocks import PIECE
from paceline.runtime.compress.configs import FormConfig, RatioConfig
from paceline.runtime.compress.nonlinear import NonlinearCodec

SAMPLE = 2**14
"""About how many elements are looked at to guess what the smallest magnitude among those sent will be."""


@dataclass(frozen=True, kw_only=True)
class TopKConfig(RatioConfig, FormConfig):
    """Knobs of `topk`."""


@CODECS.register
class TopK(NonlinearCodec):
    """Sends the k elements of largest magnitude of a bucket as values and indices.

    Lin et al., "Deep Gradient Compression" (arXiv:1712.01887), without its momentum correction and warm-up. A
    k/n-contraction: |x - decode(encode(x))|^2 <= (1 - k/n) |x|^2, so with error feedback SGD keeps its rate
    (Karimireddy et al., arXiv:1901.09847). A NaN counts as largest, so it is sent and seen.
    """

    name = "topk"
    Config = TopKConfig
    dense = False

    def __init__(self, config: TopKConfig) -> None:
        super().__init__(config)
        self._config = config

    def encode(self, bucket: Tensor) -> Payload:
        """Values (fp32, shape [k]) and their indices (int32, shape [k]), in no particular order."""
        kept = self._config.kept(bucket.numel())
        candidates = _candidates(bucket, kept)
        if candidates is None or len(candidates) < kept:
            indices = _largest(bucket, kept)
        else:
            indices = candidates[_largest(bucket.index_select(0, candidates), kept)]
        return bucket.index_select(0, indices), indices.int()

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add each value at its index."""
        values, indices = payload
        out.index_add_(0, indices, values)

    def payload_bytes(self, elements: int) -> int:
        """Four bytes of value and four of index for each element that is kept."""
        return self._config.kept(elements) * (torch.float32.itemsize + torch.int32.itemsize)


def _largest(values: Tensor, count: int) -> Tensor:
    return values.abs().topk(count, sorted=False).indices


def _candidates(bucket: Tensor, kept: int) -> Tensor | None:
    """Indices of the elements that are not smaller than a guess; None where guessing does not pay.

    Selecting among few is fast. If there are enough of them, the largest of all are among them, however bad the guess.
    """
    count = bucket.numel()
    if count < 4 * SAMPLE:
        return None
    # An odd stride walks through all columns of the usual matrices.
    sample = bucket[:: count // SAMPLE | 1].abs()
    expected = len(sample) * kept / count
    rank = math.ceil(expected + 5 * math.sqrt(expected))
    guess = sample.kthvalue(len(sample) - rank + 1).values if rank <= len(sample) else sample.new_zeros(())
    # A NaN is not smaller than anything.
    if not guess > 0:
        return None
    found = [
        (piece.abs() < guess).logical_not_().nonzero().view(-1).add_(index * PIECE)
        for index, piece in enumerate(bucket.split(PIECE))
    ]
    return torch.cat(found)
