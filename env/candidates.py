"""Generate the legal strategies that a tuning session chooses from.

Everything is derived from the knob space and the cluster: no knob is named here but those whose effect, or legality,
depends on workload and cluster.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Categorical, KnobValue, Number
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.mapping import MAPPERS, batch_shares, device_order, ring_rate

Settings = dict[str, KnobValue]
Values = Mapping[str, tuple[KnobValue, ...]]
"""The values to try of each knob, by name."""

GRID = 13
"""Values tried of a number knob."""
MAPPING = {"mapping.order", "mapping.batch_share"}
"""Knobs of the mapping that are always in use."""
SYSTEMATIC = 0.75
"""Part of the candidates that may be systematic; the rest are random, for the sake of the knobs that are numbers."""
UNEVEN_FLOPS = 1.05
"""Ratio of fastest to slowest device from which batch shares by speed are proposed."""
FASTER_RING = 1.01
"""Ratio to the ring rate in the scheduler's order from which another order is proposed."""
TRIES_PER_CANDIDATE = 20
"""Random draws per requested candidate before the space counts as used up."""


def propose(
    space: KnobSpace, workload: WorkloadProfile, cluster: Cluster, *, count: int, seed: int
) -> tuple[Strategy, ...]:
    """Up to `count` distinct legal strategies with one rank per device; index 0 is the default.

    First each choice of a name for the mapping and all of them together; then, with all of them, each other choice of
    a name and every pair of such choices (hierarchical exchanges with half-width gradients on the slow tier, local SGD
    with a sparsifying codec, ...); then random combinations drawn from the seed. Names that change nothing on this
    cluster are left out. Equal arguments give equal candidates. Fewer are returned when the space has no more. Raises
    IllegalStrategy when even the default cannot run, because the cluster has more devices than the global batch has
    samples.
    """
    _check_shares(space.default, workload, cluster)

    def legal(settings: Settings) -> Strategy | None:
        try:
            strategy = space.strategy(settings, world_size=cluster.size)
            _check_shares(strategy, workload, cluster)
        except IllegalStrategy:
            return None
        return None if _is_idle(strategy) else strategy

    values = {knob.name: _values(knob, cluster) for knob in space.knobs}
    choices = [choice for choice in _choices(space, values) if legal(choice) is not None]
    mapping = [choice for choice in choices if choice.keys() <= MAPPING]
    others = [choice for choice in choices if not choice.keys() <= MAPPING]
    together: Settings = {}
    for choice in mapping:
        together = choice | together
    rng = np.random.default_rng(seed)
    found = dict.fromkeys([space.default])
    systematic = itertools.chain(mapping, (together | choice for choice in _combinations(space, values, others)))
    random = (_random(space, values, together, rng) for _ in range(TRIES_PER_CANDIDATE * count))
    for proposed, most in ((systematic, round(SYSTEMATIC * count)), (random, count)):
        for settings in proposed:
            if len(found) >= most:
                break
            strategy = legal(settings)
            if strategy is not None:
                found[strategy] = None
    return tuple(found)


def _check_shares(strategy: Strategy, workload: WorkloadProfile, cluster: Cluster) -> None:
    """Raise IllegalStrategy where a rank would be left without a sample."""
    order = device_order(strategy, cluster, cluster.size)
    batch_shares(strategy, cluster, order, workload.global_batch)


def _is_idle(strategy: Strategy) -> bool:
    """Whether a codec is confined to the slow tier and there is none."""
    return strategy.get("compress.tier") == "slow" and strategy["compress.codec"] == "none"


def _values(knob: Knob, cluster: Cluster) -> tuple[KnobValue, ...]:
    """Values to try: those of the domain's grid that make a difference on this cluster, the default always."""
    if knob.name == "mapping.order":
        return (knob.default, *_faster_orders(cluster))
    flops = [device.profile.flops for device in cluster.devices]
    if knob.name == "mapping.batch_share" and max(flops) <= UNEVEN_FLOPS * min(flops):
        return (knob.default,)
    values = knob.domain.grid(GRID)
    if knob.name == "sync.mode" and not cluster.tiers:
        return tuple(value for value in values if value != "hierarchical")
    return values


def _faster_orders(cluster: Cluster) -> list[str]:
    """Mappers whose ring of ranks is faster than that of the scheduler's order, the fastest first."""
    rates = {name: ring_rate(cluster, MAPPERS.get(name)().order(cluster, cluster.size)) for name in MAPPERS.names()}
    faster = [name for name, rate in rates.items() if rate > FASTER_RING * rates["scheduler"]]
    return sorted(faster, key=lambda name: -rates[name])


def _choices(space: KnobSpace, values: Values) -> list[Settings]:
    """Every value that is no number, of every knob that is always in use, but for the defaults."""
    return [
        {knob.name: value}
        for knob in space.knobs
        if knob.requires is None and not isinstance(knob.domain, Number)
        for value in values[knob.name]
        if value != knob.default
    ]


def _combinations(space: KnobSpace, values: Values, choices: Sequence[Settings]) -> Iterator[Settings]:
    """Nothing, each choice, and each pair; those that bring a knob with names into use, also with its other names."""
    pairs = (a | b for a, b in itertools.combinations(choices, 2) if a.keys() != b.keys())
    for settings in itertools.chain([{}], choices, pairs):
        yield settings
        complete = {**space.default, **settings}
        for knob in space.knobs:
            if knob.requires is not None and isinstance(knob.domain, Categorical) and space.in_use(knob, complete):
                yield from (settings | {knob.name: value} for value in values[knob.name] if value != knob.default)


def _random(space: KnobSpace, values: Values, mapping: Settings, rng: np.random.Generator) -> Settings:
    """Each knob in use as the mapping or the default has it or, equally likely, at any of its values."""
    settings = {**space.default, **mapping}
    # Selectors first, so that the knobs which depend on them know whether they are in use.
    for knob in sorted(space.knobs, key=lambda knob: knob.requires is not None):
        options = values[knob.name]
        pick = options[rng.integers(len(options))]
        if space.in_use(knob, settings) and rng.random() < 0.5:
            settings[knob.name] = pick
    return settings
