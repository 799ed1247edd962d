"""Precision recipes: in which number format forward and backward compute. One file per recipe."""

from paceline.runtime.domain.knobs import Knob, Rule
from paceline.runtime.knobs import plugin_knobs, plugin_rules, selector_knob
from paceline.runtime.precision.base import RECIPES

RECIPES.load()


def knobs() -> list[Knob]:
    """`precision.compute` and the knobs of the recipes."""
    selector = selector_knob(
        RECIPES,
        name="precision.compute",
        default="fp32",
        doc="Number format of forward and backward: one of the recipes.",
    )
    return [selector, *plugin_knobs(RECIPES, selector=selector.name)]


def rules() -> tuple[Rule, ...]:
    """What the recipes do not go together with."""
    return plugin_rules(RECIPES)


__all__ = ["RECIPES", "knobs", "rules"]
