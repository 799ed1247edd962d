"""Knobs that several codecs have, and what goes with them."""

import math
from dataclasses import dataclass

from paceline.runtime.domain.domains import Boolean, Categorical, Number
from paceline.runtime.domain.knobs import Rule
from paceline.runtime.knobs import KnobConfig, knob

OWN_FORM = ("async", "hierarchical", "reduction_server")
"""Sync modes whose exchange has a form of its own."""


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig(KnobConfig):
    """The knob of every codec that drops something."""

    error_feedback: bool = knob("compress.error_feedback", Boolean(), default=True)
    """Whether what was not sent is added to the next bucket (true or false)."""


@dataclass(frozen=True, kw_only=True)
class RatioConfig(FeedbackConfig):
    """The knob of codecs that send some of the elements."""

    ratio: float = knob("compress.ratio", Number(low=0.001, high=0.5, log=True), default=0.05)
    """Fraction of a bucket's elements that is sent, rounded up to whole elements; from 0.001 to 0.5."""

    def kept(self, elements: int) -> int:
        """How many of so many elements are sent."""
        return math.ceil(self.ratio * elements)


@dataclass(frozen=True, kw_only=True)
class FormConfig(FeedbackConfig):
    """The knob of codecs whose payloads cannot be summed on the wire."""

    form: str = knob("compress.form", Categorical(choices=("auto", "gather", "owners")), default="auto")
    """Form of a flat exchange over n ranks: `gather`, each rank sends its payload to n - 1 others; `owners`, it sends
    2(n - 1)/n payloads, but sums are encoded again; `auto`, owners for dense codecs and gather for topk."""


FORM_RULES = (
    Rule(
        knob="sync.mode",
        values=OWN_FORM,
        other="compress.form",
        allowed=("auto",),
        because="the mode decides itself how payloads are summed",
    ),
)
