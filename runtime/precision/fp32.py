"""Plain single precision."""

from contextlib import AbstractContextManager, nullcontext

from paceline.runtime.precision.base import RECIPES, PrecisionRecipe


@RECIPES.register
class Fp32(PrecisionRecipe):
    """Everything in fp32, as PyTorch does by default."""

    name = "fp32"

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """No context: nothing is cast."""
        return nullcontext()
