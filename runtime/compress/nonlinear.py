"""Codecs whose payloads cannot be summed on the wire."""

from typing import ClassVar

from paceline.runtime.compress.base import BlockCodec
from paceline.runtime.compress.configs import FORM_RULES, FormConfig
from paceline.runtime.knobs import KnobConfig


class NonlinearCodec(BlockCodec):
    """A flat exchange gathers the payloads everywhere, or has every rank sum a part of the bucket.

    Each rank sends n - 1 payloads in the first form and 2(n - 1)/n in the second, which encodes the sum again. That
    is one more rounding where every element is sent. Of a sparse sum, with up to n times as many elements as a payload
    holds, most would be dropped.
    """

    linear = False
    lossy = True
    rules = FORM_RULES
    Config: ClassVar[type[KnobConfig]] = FormConfig
    dense: ClassVar[bool]
    """Whether every element is sent, so that sums lose little by being encoded again."""

    def __init__(self, config: FormConfig) -> None:
        self._form = config.form
        self._error_feedback = config.error_feedback

    @property
    def error_feedback(self) -> bool:
        """As `compress.error_feedback` says."""
        return self._error_feedback

    @property
    def sums_at_owners(self) -> bool:
        """As `compress.form` says; `auto` follows from the bytes and the losses, see the class."""
        return self.dense if self._form == "auto" else self._form == "owners"
