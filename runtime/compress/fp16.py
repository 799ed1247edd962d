"""Half precision on the wire."""

import torch

from paceline.runtime.compress.base import CODECS
from paceline.runtime.compress.cast import HalfCodec


@CODECS.register
class Fp16(HalfCodec):
    """IEEE half precision: relative error 2^-11, at most 65504, so average first and encode then."""

    name = "fp16"
    dtype = torch.float16
