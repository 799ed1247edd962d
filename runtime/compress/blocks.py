"""Buckets in blocks of elements that share a scale."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

BLOCK = 256
"""Elements that share a scale; the last block of a bucket may be shorter."""
PIECE = 2**16
"""Elements that are worked on at once: what is computed on the way then stays in the cache, and needs no fresh memory,
whose first touch costs more than the arithmetic."""


class Piece(NamedTuple):
    """Successive blocks of equal length."""

    elements: slice
    """Where they are in the bucket."""
    blocks: slice
    """Their numbers."""
    width: int
    """Elements of a block."""

    def of(self, flat: Tensor) -> Tensor:
        """Their elements, [blocks, width], as a view of a tensor with one entry per element."""
        return flat[self.elements].view(-1, self.width)


def block_count(elements: int) -> int:
    """How many blocks so many elements are."""
    return -(-elements // BLOCK)


def pieces(elements: int) -> Iterator[Piece]:
    """Cut a bucket of so many elements."""
    whole = elements - elements % BLOCK
    for start in range(0, whole, PIECE):
        stop = min(start + PIECE, whole)
        yield Piece(slice(start, stop), slice(start // BLOCK, stop // BLOCK), BLOCK)
    if whole < elements:
        yield Piece(slice(whole, elements), slice(whole // BLOCK, whole // BLOCK + 1), elements - whole)
