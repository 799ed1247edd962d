"""float16 autocast with a dynamic loss scale."""

from contextlib import AbstractContextManager

import torch

from paceline.runtime.precision.base import RECIPES, PrecisionRecipe


@RECIPES.register
class Fp16(PrecisionRecipe):
    """Matrix multiplies in float16 by `torch.autocast`; fp32 weights. The loss is scaled, see `LossScale`."""

    name = "fp16"
    scales_loss = True

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """torch.autocast with PyTorch's own lists of operations."""
        return torch.autocast(device_type, dtype=torch.float16)
