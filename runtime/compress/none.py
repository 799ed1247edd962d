"""No compression."""

import torch

from paceline.runtime.compress.base import CODECS
from paceline.runtime.compress.cast import CastCodec


@CODECS.register
class NoCodec(CastCodec):
    """fp32 as it is, without a copy: the payload aliases the bucket."""

    name = "none"
    dtype = torch.float32
    lossy = False
