"""Low-rank gradients."""

import math
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS, Joint, JointCodec, Layout
from paceline.runtime.compress.configs import FeedbackConfig
from paceline.runtime.domain.domains import Number
from paceline.runtime.domain.knobs import Rule
from paceline.runtime.knobs import knob

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class PowerSgdConfig(FeedbackConfig):
    """Knobs of `powersgd`."""

    rank: int = knob("compress.rank", Number(low=1, high=32, log=True, integer=True), default=4)
    """Rank of the approximation of each gradient matrix, 1 to 32."""


@CODECS.register
class PowerSgd(JointCodec):
    """Sends each gradient matrix M as two thin ones, P Q^T, by one step of power iteration from the last step's Q.

    Vogels et al., "PowerSGD" (arXiv:1905.13727). P is the sum of M Q over ranks, made orthonormal, and Q the sum of
    M^T P. A tensor of more dimensions is a matrix of its first by the rest. What would not become smaller is sent as it
    is. Of each rank's M arrives the projection P P^T M, and |M - P P^T M|^2 = |M|^2 - |P^T M|^2; if the sum over ranks
    has at most this rank, it arrives whole. Biased, so meant for error feedback.
    """

    name = "powersgd"
    Config = PowerSgdConfig
    lossy = True
    rules = (
        Rule(
            knob="compress.codec",
            values=("powersgd",),
            other="compress.tier",
            allowed=("all",),
            because="all ranks must sum factors of the same matrices",
        ),
    )

    def __init__(self, config: PowerSgdConfig) -> None:
        super().__init__(config)
        self._config = config

    @property
    def error_feedback(self) -> bool:
        """As `compress.error_feedback` says."""
        return self._config.error_feedback

    def converse(self, bucket: Tensor, layout: Layout, world_size: int) -> Generator[Tensor, Tensor, Joint]:
        """Have [what is sent as it is, every P] summed, and then every Q^T."""
        plain, alike = self._sort(layout)
        sent = [bucket[part] for part in plain]
        matrices = [[bucket[each.part].view(shape) for each in same] for shape, same in alike.items()]
        lefts = [
            torch.stack([matrix @ self._start(each.name, matrix).T for matrix, each in zip(group, same, strict=True)])
            for group, same in zip(matrices, alike.values(), strict=True)
        ]
        first = _part((yield _join([*sent, *lefts])), [*sent, *lefts])
        # Of columns that are zero or depend on others, an orthonormal basis is still one: it has no NaN.
        bases = [torch.linalg.qr(left).Q for left in first[len(sent) :]]
        own = [
            torch.stack([basis.T @ matrix for matrix, basis in zip(group, same, strict=True)])
            for group, same in zip(matrices, bases, strict=True)
        ]
        rights = _part((yield _join(own)), own) if own else []

        total, share = torch.empty_like(bucket), bucket.clone()
        for part, arrived in zip(plain, first, strict=False):
            total[part] = arrived
        for (shape, same), basis, right, mine in zip(alike.items(), bases, rights, own, strict=True):
            for index, (name, part) in enumerate(same):
                torch.mm(basis[index], right[index], out=total[part].view(shape))
                torch.mm(basis[index], mine[index], out=share[part].view(shape))
                # The next P is a product with this. Its scale does not matter, but must not grow with the gradient's.
                self.remember(name, right[index] / right[index].abs().amax(1, keepdim=True).clamp_(min=TINY))
        return Joint(total, share)

    def bucket_bytes(self, shapes: Iterable[torch.Size]) -> int:
        """Four bytes for each element of P, Q and what is sent as it is."""
        rank, elements = self._config.rank, 0
        for shape in shapes:
            matrix = _as_matrix(shape, rank)
            elements += shape.numel() if matrix is None else sum(matrix) * rank
        return elements * torch.float32.itemsize

    def _sort(self, layout: Layout) -> "tuple[list[slice], dict[_Shape, list[_Place]]]":
        """What is sent as it is, and the matrices by shape."""
        plain: list[slice] = []
        alike: dict[_Shape, list[_Place]] = defaultdict(list)
        start = 0
        for name, shape in layout:
            part = slice(start, start + shape.numel())
            matrix = _as_matrix(shape, self._config.rank)
            if matrix is None:
                plain.append(part)
            else:
                alike[matrix].append(_Place(name, part))
            start = part.stop
        return plain, alike

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """The last step's Q^T, or random numbers where there is none of this shape."""
        shape = (self._config.rank, matrix.shape[1])
        start = self.recall(name)
        if start is None or start.shape != shape:
            start = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        return start.to(matrix.device)


_Shape = tuple[int, int]
"""Rows and columns."""


class _Place(NamedTuple):
    """A matrix in a bucket."""

    name: str
    part: slice


def _as_matrix(shape: torch.Size, rank: int) -> _Shape | None:
    """The shape as a matrix, unless factors of this rank would not be smaller."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _part(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `_join` of tensors of these shapes."""
    pieces = joined.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]
