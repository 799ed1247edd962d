"""Single precision whose products are rounded to ten bits of mantissa."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from paceline.runtime.precision.base import RECIPES, PrecisionRecipe, lacks_cuda


@RECIPES.register
class Tf32(PrecisionRecipe):
    """Matrix multiplies on the tensor cores in TensorFloat-32, as PyTorch computes convolutions by default.

    Source: the PyTorch documentation, "CUDA semantics", TensorFloat-32. Needs Ampere or newer.
    """

    name = "tf32"

    @classmethod
    def missing(cls, kinds: Collection[str]) -> str | None:
        """Tensor cores that know the format."""
        return lacks_cuda(kinds, (8, 0))

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """None: the step's context covers the forward pass."""
        return nullcontext()

    def step_context(self) -> AbstractContextManager[object]:
        """PyTorch's setting of this process, which holds on the threads of the backward pass as well."""
        return _allowed()


@contextmanager
def _allowed() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
