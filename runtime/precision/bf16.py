"""bfloat16 autocast."""

from contextlib import AbstractContextManager

import torch

from paceline.runtime.precision.base import RECIPES, PrecisionRecipe


@RECIPES.register
class Bf16(PrecisionRecipe):
    """Matrix multiplies in bfloat16 by `torch.autocast`; fp32 weights, so no loss scaling is needed."""

    name = "bf16"

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """torch.autocast with PyTorch's own lists of operations."""
        return torch.autocast(device_type, dtype=torch.bfloat16)
