"""The sample stream: which samples each step of a trial trains on.

All epochs form one endless stream of indices, each epoch a permutation of the training set drawn from the seed.
A step consumes the next `global_batch` positions, and the ranks take contiguous parts of them by share. Position in
the stream is all there is to account for, so no change of members, shares or strategy can skip or repeat a sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SampleStream:
    """Maps positions in the stream to sample indices."""

    def __init__(self, train_samples: int, seed: int) -> None:
        self._size = train_samples
        self._seed = seed
        self._epochs: dict[int, Tensor] = {}

    def _epoch(self, number: int) -> Tensor:
        if number not in self._epochs:
            generator = torch.Generator().manual_seed((self._seed << 20) ^ number)
            # Only the epochs around the present position are needed again.
            self._epochs = {key: value for key, value in self._epochs.items() if key >= number - 1}
            self._epochs[number] = torch.randperm(self._size, generator=generator)
        return self._epochs[number]

    def indices(self, start: int, stop: int) -> Tensor:
        """Sample indices at the stream positions [start, stop): int64, shape [stop - start]."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self._size)
            count = min(stop - start, self._size - offset)
            parts.append(self._epoch(epoch)[offset : offset + count])
            start += count
        return torch.cat(parts)


def rank_range(cursor: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Half-open range of stream positions that `rank` trains on in the step that begins at `cursor`."""
    start = cursor + sum(shares[:rank])
    return start, start + shares[rank]
