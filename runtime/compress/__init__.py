"""Gradient codecs: what travels instead of fp32 gradients. One file per codec."""

from paceline.runtime.compress.base import CODECS
from paceline.runtime.domain.knobs import Knob, Rule
from paceline.runtime.knobs import plugin_knobs, plugin_rules, selector_knob

CODECS.load()


def knobs() -> list[Knob]:
    """`compress.codec` and the knobs of the codecs."""
    selector = selector_knob(
        CODECS,
        name="compress.codec",
        default="none",
        doc="How gradients (or, between syncs of local SGD, parameter changes) are encoded on the wire.",
    )
    return [selector, *plugin_knobs(CODECS, selector=selector.name)]


def rules() -> tuple[Rule, ...]:
    """What the codecs do not go together with."""
    return plugin_rules(CODECS)


__all__ = ["CODECS", "knobs", "rules"]
