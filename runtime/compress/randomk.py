"""Random sparsification."""

import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS, Joint, JointCodec, Layout
from paceline.runtime.compress.configs import RatioConfig
from paceline.runtime.domain.knobs import Rule


@dataclass(frozen=True, kw_only=True)
class RandomKConfig(RatioConfig):
    """Knobs of `randomk`."""


@CODECS.register
class RandomK(JointCodec):
    """Sends k random elements of a bucket, the same on all ranks, so that only values travel and can be summed.

    Stich et al., "Sparsified SGD with Memory" (arXiv:1809.07599). The indices are one of each k-th part of the bucket,
    after a random rotation (stratified, not independent draws, which cost a permutation of the whole bucket). What
    matters is kept: exactly k are chosen, each element with probability k/n in every step. So without error feedback,
    values times n/k are unbiased; with it they are sent as they are, and the codec contracts in expectation:
    E |x - sent|^2 = (1 - k/n) |x|^2. A NaN is seen once it is chosen.
    """

    name = "randomk"
    Config = RandomKConfig
    lossy = True
    rules = (
        Rule(
            knob="compress.codec",
            values=("randomk",),
            other="compress.tier",
            allowed=("all",),
            because="all ranks must choose the same elements of a whole bucket",
        ),
    )

    def __init__(self, config: RandomKConfig) -> None:
        super().__init__(config)
        self._config = config

    @property
    def error_feedback(self) -> bool:
        """As `compress.error_feedback` says."""
        return self._config.error_feedback

    def converse(self, bucket: Tensor, layout: Layout, world_size: int) -> Generator[Tensor, Tensor, Joint]:
        """Have the chosen values summed, shape [k]."""
        count = bucket.numel()
        kept = self._config.kept(count)
        # A bucket is known by its first parameter. CRC-32 fills the 32 bits that the generator takes.
        name, _ = layout[0]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.steps} {name}".encode()))
        indices = choose(count, kept, generator).to(bucket.device)
        values = bucket.index_select(0, indices)
        if not self.error_feedback:
            values.mul_(count / kept)
        share = torch.zeros_like(bucket).index_copy_(0, indices, values)
        summed = yield values
        return Joint(torch.zeros_like(bucket).index_copy_(0, indices, summed), share)

    def bucket_bytes(self, shapes: Iterable[torch.Size]) -> int:
        """Four bytes for each element that is chosen."""
        return self._config.kept(sum(shape.numel() for shape in shapes)) * torch.float32.itemsize


def choose(count: int, kept: int, generator: torch.Generator) -> Tensor:
    """Different indices, int64 of shape [kept], each of 0..count-1 with probability kept/count."""
    bounds = torch.arange(kept + 1).mul_(count).floor_divide_(kept)
    within = torch.rand(kept, generator=generator).mul_(bounds.diff()).long()
    rotation = torch.randint(count, (), generator=generator)
    return within.add_(bounds[:-1]).add_(rotation).remainder_(count)
