"""Eight-bit floating point on the wire."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.compress.base import CODECS
from paceline.runtime.compress.configs import FormConfig
from paceline.runtime.compress.scaled import ScaledCodec
from paceline.runtime.domain.domains import Categorical
from paceline.runtime.knobs import knob

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Fp8Config(FormConfig):
    """Knobs of `fp8`."""

    format: str = knob("compress.fp8_format", Categorical(choices=tuple(FORMATS)), default="e4m3")
    """Bits of exponent and mantissa: e4m3, relative error 2^-4 over four decades; e5m2, 2^-3 over nine."""


@CODECS.register
class Fp8(ScaledCodec):
    """Floating point with a scale per block of B = 256, to the nearest.

    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433). Relative errors are at most u = 2^-4 (e4m3)
    or 2^-3 (e5m2) down to a fraction f of the block's largest magnitude, and absolute errors below it at most u f of
    that; so the codec is a contraction: |x - decode(encode(x))|^2 <= u^2 (1 + B f^2) |x|^2, f < 2^-14.
    """

    name = "fp8"
    Config = Fp8Config

    def __init__(self, config: Fp8Config) -> None:
        super().__init__(config)
        self.dtype = FORMATS[config.format]
        self.largest = torch.finfo(self.dtype).max
        # Looking a value up is several times faster than converting it.
        self._values = torch.arange(256, dtype=torch.uint8).view(self.dtype).float()

    def _code(self, scaled: Tensor) -> Tensor:
        return scaled

    def _value(self, codes: Tensor) -> Tensor:
        places = codes.view(torch.uint8).int().view(-1)
        return self._values.to(codes.device).index_select(0, places).view(codes.shape)
