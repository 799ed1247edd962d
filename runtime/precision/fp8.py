"""8-bit linear layers within bfloat16 autocast."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.overrides import TorchFunctionMode

from paceline.runtime.precision.base import RECIPES, PrecisionRecipe, lacks_cuda

MULTIPLE = 16
"""What every dimension of an 8-bit product must be a multiple of."""


@RECIPES.register
class Fp8(PrecisionRecipe):
    """Linear layers in float8: weights and activations as e4m3, gradients as e5m2, one scale per tensor and product.

    Scales follow the largest element of the tensor as it is. What has a dimension that is no multiple of 16, and
    whatever is no `torch.nn.functional.linear`, computes as under `bf16`. Source: Micikevicius et al., "FP8 Formats for
    Deep Learning", arXiv:2209.05433. Needs Ada or newer.
    """

    name = "fp8"
    nearest = "bf16"

    @classmethod
    def missing(cls, kinds: Collection[str]) -> str | None:
        """Tensor cores that know the formats."""
        return lacks_cuda(kinds, (8, 9))

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """torch.autocast, in which linear layers are replaced."""
        return _linears_replaced(device_type)


@contextmanager
def _linears_replaced(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, dtype=torch.bfloat16), _ReplaceLinear():
        yield


class _ReplaceLinear(TorchFunctionMode):
    # Modules stay as they are, so that parameters keep their names and a live switch has nothing to convert.
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.numel() // max(1, input.shape[-1])
    if any(size % MULTIPLE for size in (rows, *weight.shape)):
        return F.linear(input, weight, bias)
    output: Tensor = _Fp8Linear.apply(input.reshape(rows, -1), weight, bias)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], -1)


class _Fp8Linear(torch.autograd.Function):
    """Input [m, k], weight [n, k], bias [n] to bf16 [m, n]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded_input, input_scale = _round(input, torch.float8_e4m3fn)
        rounded_weight, weight_scale = _round(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(rounded_input, input_scale, rounded_weight, weight_scale)
        ctx.types = input.dtype, weight.dtype, bias.dtype if bias is not None else None
        output = _product(rounded_input, input_scale, rounded_weight.t(), weight_scale)
        return output if bias is None else output + bias.to(output.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, input_scale, weight, weight_scale = ctx.saved_tensors
        input_type, weight_type, bias_type = ctx.types
        rounded, scale = _round(gradient, torch.float8_e5m2)
        of_input = _product(rounded, scale, _by_column(weight), weight_scale)
        of_weight = _product(rounded.t().contiguous(), scale, _by_column(input), input_scale)
        of_bias = gradient.sum(dim=0, dtype=bias_type) if bias_type is not None else None
        return of_input.to(input_type), of_weight.to(weight_type), of_bias


def _round(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in an 8-bit format, row by row in memory, and the fp32 factor that gives it back."""
    largest = torch.finfo(dtype).max
    scale = tensor.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    # Rounding to the factor may leave the largest element just beyond the format's range.
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _by_column(matrix: Tensor) -> Tensor:
    """The matrix column by column in memory, as the second factor of an 8-bit product must be."""
    return matrix.t().contiguous().t()


def _product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    """left @ right, by their scales, in bf16."""
    return F.scaled_mm(
        left,
        right,
        left_scale,
        ScalingType.TensorWise,
        right_scale,
        ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )
