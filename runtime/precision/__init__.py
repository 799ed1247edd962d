"""Precision recipes: in which number format forward and backward compute. One file per recipe."""

from collections.abc import Collection, Mapping

from paceline.runtime.domain.domains import Categorical, KnobValue, Number
from paceline.runtime.domain.knobs import Knob, Requirement, Rule
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.knobs import plugin_knobs, plugin_rules, selector_knob
from paceline.runtime.precision.base import RECIPES
from paceline.runtime.precision.loss_scale import LossScale

RECIPES.load()


def knobs() -> list[Knob]:
    """`precision.compute`, the knobs of the recipes, and how the trial comes to compute so."""
    selector = selector_knob(
        RECIPES,
        name="precision.compute",
        default="fp32",
        doc="Number format of forward and backward: one of the recipes.",
    )
    phases = Knob(
        name="precision.phases",
        doc="How a trial comes to its number formats: at once (off); or in stages, first all in fp32, then without "
        "codec, then as set, each for a number of steps (steps) or until the training loss is stable (stable).",
        domain=Categorical(choices=("off", "steps", "stable")),
        default="off",
    )
    phase_steps = Knob(
        name="precision.phase_steps",
        doc="Steps of a stage, 5 to 5000; with stable, also those in which the loss must be stable.",
        domain=Number(low=5, high=5000, log=True, integer=True),
        default=50,
        requires=Requirement(knob=phases.name, values=("steps", "stable")),
    )
    return [selector, phases, phase_steps, *plugin_knobs(RECIPES, selector=selector.name)]


def rules() -> tuple[Rule, ...]:
    """What the recipes do not go together with."""
    return plugin_rules(RECIPES)


def check_devices(strategy: Mapping[str, KnobValue], kinds: Collection[str]) -> None:
    """Raises IllegalStrategy where devices of these kinds cannot compute as the strategy says."""
    name = str(strategy["precision.compute"])
    recipe = RECIPES.get(name)
    if missing := recipe.missing(kinds):
        found = ", ".join(sorted(set(kinds)))
        raise IllegalStrategy(
            f"precision.compute={name} needs {missing}, and the devices are {found}; "
            f"set precision.compute={recipe.nearest}"
        )


__all__ = ["RECIPES", "LossScale", "check_devices", "knobs", "rules"]
