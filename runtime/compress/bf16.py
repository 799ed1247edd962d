"""bfloat16 on the wire."""

import torch

from paceline.runtime.compress.base import CODECS
from paceline.runtime.compress.cast import HalfCodec


@CODECS.register
class Bf16(HalfCodec):
    """bfloat16: relative error 2^-8, the range of fp32."""

    name = "bf16"
    dtype = torch.bfloat16
