"""Sync modes: how the replicas of a model are kept together. One file per mode."""

from paceline.runtime.domain.knobs import Knob, Rule
from paceline.runtime.knobs import plugin_knobs, plugin_rules, selector_knob
from paceline.runtime.sync.base import SYNC_MODES

SYNC_MODES.load()


def knobs() -> list[Knob]:
    """`sync.mode` and the knobs of the modes."""
    selector = selector_knob(
        SYNC_MODES,
        name="sync.mode",
        default="allreduce",
        doc="How replicas are kept together: averaging gradients every step, or parameters now and then.",
    )
    return [selector, *plugin_knobs(SYNC_MODES, selector=selector.name)]


def rules() -> tuple[Rule, ...]:
    """What the modes do not go together with."""
    return plugin_rules(SYNC_MODES)


__all__ = ["SYNC_MODES", "knobs", "rules"]
