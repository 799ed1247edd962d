"""Top-k sparsification."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS, BlockCodec, Payload
from paceline.runtime.domain.domains import Boolean, Number
from paceline.runtime.knobs import KnobConfig, knob


@dataclass(frozen=True, kw_only=True)
class TopKConfig(KnobConfig):
    """Knobs of `topk`."""

    ratio: float = knob("compress.ratio", Number(low=0.001, high=0.5, log=True), default=0.05)
    """Fraction of a bucket's elements that is sent, rounded up to whole elements; from 0.001 to 0.5."""
    error_feedback: bool = knob("compress.error_feedback", Boolean(), default=True)
    """Whether what was not sent is added to the next bucket (true or false)."""


@CODECS.register
class TopK(BlockCodec):
    """Sends the k elements of largest magnitude of a bucket as values and indices.

    Lin et al., "Deep Gradient Compression" (arXiv:1712.01887), without its momentum correction and warm-up. A
    k/n-contraction: |x - decode(encode(x))|^2 <= (1 - k/n) |x|^2, so with error feedback SGD keeps its rate
    (Karimireddy et al., arXiv:1901.09847). A NaN counts as largest, so it is sent and seen.
    """

    name = "topk"
    Config = TopKConfig
    linear = False
    lossy = True

    def __init__(self, config: TopKConfig) -> None:
        self._config = config

    @property
    def error_feedback(self) -> bool:
        """As `compress.error_feedback` says."""
        return self._config.error_feedback

    def encode(self, bucket: Tensor) -> Payload:
        """Values (fp32, shape [k]) and their indices (int32, shape [k]), in no particular order."""
        indices = bucket.abs().topk(self._kept(bucket.numel()), sorted=False).indices
        return bucket[indices], indices.int()

    def decode(self, payload: Payload, out: Tensor) -> None:
        """Add each value at its index."""
        values, indices = payload
        out.index_add_(0, indices, values)

    def payload_bytes(self, elements: int) -> int:
        """Four bytes of value and four of index for each element that is kept."""
        return self._kept(elements) * (torch.float32.itemsize + torch.int32.itemsize)

    def _kept(self, elements: int) -> int:
        return math.ceil(self._config.ratio * elements)
