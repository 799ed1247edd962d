"""Every two values of two knobs that go together, in a trial; every two that do not, refused by name."""

import itertools
import random
from collections.abc import Iterator

import pytest

from paceline.runtime.domain.domains import Integers, KnobValue, PerRank
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.knobs import knob_space
from paceline.runtime.precision import RECIPES
from tests.runtime.support import assert_every_sample_once, digests, last_snapshot, result_of, run, spec_for

WORLD_SIZE = 3
"""One less than there are devices, so that one is spare."""
STEPS = 6

Setting = tuple[str, KnobValue]
Pair = frozenset[Setting]
EXPLICIT = {
    "mapping.order": "2,0,1",
    "mapping.batch_share": "3,1,2",
    "mapping.groups": "1,2,2",
    "mapping.reducers": "3",
    "sync.layer_periods": "1,3",
}


def values_of(knob: Knob) -> tuple[KnobValue, ...]:
    """Ends of its domain, every name, and one explicit list where there may be one."""
    values = list(knob.domain.grid(2))
    if isinstance(knob.domain, PerRank | Integers):
        values.append(EXPLICIT[knob.name])
    if knob.name == "precision.compute":
        values = [value for value in values if RECIPES.get(str(value)).missing({"cpu"}) is None]
    return tuple(values)


def completed(space: KnobSpace, settings: dict[str, KnobValue]) -> dict[str, KnobValue] | None:
    """The settings with what they need to be in use, or None if there is no such strategy."""
    settings = dict(settings)
    needed = [knob.requires for name in settings if (knob := space[name]).requires is not None]
    selectors: dict[str, set[str]] = {}
    for requirement in needed:
        known = selectors.setdefault(requirement.knob, set(requirement.values))
        known &= set(requirement.values)
    choices = [
        [(name, value) for value in sorted(values)] for name, values in selectors.items() if name not in settings
    ]
    for chosen in itertools.product(*choices):
        attempt = {**settings, **dict(chosen)}
        if is_in_use(space, attempt):
            return attempt
    return None


def is_in_use(space: KnobSpace, settings: dict[str, KnobValue]) -> bool:
    """Whether the strategy is legal and every knob that is named has an effect."""
    if not space.is_legal(settings, world_size=WORLD_SIZE):
        return False
    values = {**space.default, **settings}
    return all(space.in_use(space[name], values) for name in settings)


def pairs_of(settings: dict[str, KnobValue]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(settings.items(), 2)}


def all_pairs(space: KnobSpace) -> Iterator[Pair]:
    for first, second in itertools.combinations(space.knobs, 2):
        for one, two in itertools.product(values_of(first), values_of(second)):
            yield frozenset({(first.name, one), (second.name, two)})


def covering(space: KnobSpace) -> list[dict[str, KnobValue]]:
    """Strategies in which every pair of values that go together occurs, found greedily."""
    left = {pair for pair in all_pairs(space) if completed(space, dict(pair)) is not None}
    shuffled = random.Random(0)
    found = []
    for pair in sorted(left, key=sorted):
        if pair not in left:
            continue
        settings = completed(space, dict(pair))
        assert settings is not None
        knobs = list(space.knobs)
        shuffled.shuffle(knobs)
        for knob in knobs:
            if knob.name in settings:
                continue
            attempts = [{**settings, knob.name: value} for value in values_of(knob)]
            legal = [attempt for attempt in attempts if is_in_use(space, attempt)]
            if legal:
                settings = max(legal, key=lambda attempt: len(pairs_of(attempt) & left))
        left -= pairs_of(settings)
        found.append(settings)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_of_values_that_go_together_trains(embedded: EmbeddedRuntime) -> None:
    for settings in covering(embedded.describe_knobs()):
        spec = spec_for(embedded, settings, steps=STEPS, world_size=WORLD_SIZE, evaluations=2)
        events = run(embedded, spec)
        assert result_of(events).failure in (None, "diverged"), f"{settings}: {result_of(events).message}"
        if result_of(events).failure is None:
            assert_every_sample_once(events, global_batch=13, steps=STEPS)
            assert len(set(digests(last_snapshot(events), "model"))) == 1, settings


def test_every_pair_that_a_rule_forbids_is_refused_with_both_names() -> None:
    space = knob_space()
    assert space.rules
    for rule in space.rules:
        restricted = space[rule.other]
        for value, other in itertools.product(rule.values, values_of(restricted)):
            if other in rule.allowed:
                continue
            settings = completed(KnobSpace(knobs=space.knobs), {rule.knob: value, rule.other: other})
            if settings is None:
                continue
            with pytest.raises(IllegalStrategy) as refused:
                space.strategy(settings)
            assert "does not go with" in str(refused.value)


def test_every_value_occurs_and_the_covering_is_small() -> None:
    space = knob_space()
    found = covering(space)
    occurring = {setting for settings in found for setting in settings.items()}
    for knob in space.knobs:
        assert {(knob.name, value) for value in values_of(knob)} <= occurring
    assert len(found) < 150
