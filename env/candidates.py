"""Generate the legal strategies that a tuning session chooses from.

Everything is derived from the knob space and the cluster: no knob is named here but those whose effect, or legality,
depends on workload and cluster.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from paceline.env.schedule import complete
from paceline.env.simulator import Unknowns, simulate
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Categorical, KnobValue, Number
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.mapping import MAPPERS, batch_shares, device_order, reducer_devices, ring_rate
from paceline.runtime.precision import RECIPES

Settings = dict[str, KnobValue]
Values = Mapping[str, tuple[KnobValue, ...]]
"""The values to try of each knob, by name."""

GRID = 13
"""Values tried of a number knob."""
MAPPING = {"mapping.order", "mapping.batch_share"}
"""Knobs of the mapping that are always in use."""
SYSTEMATIC = 0.5
"""Part of the candidates that may be systematic; the rest are random, for the sake of the knobs that are numbers."""
UNEVEN_FLOPS = 1.05
"""Ratio of fastest to slowest device from which batch shares by speed are proposed."""
FASTER_RING = 1.01
"""Ratio to the ring rate in the scheduler's order from which another order is proposed."""
LAYER_PERIODS = ("1,4", "4,1")
"""Periods of the layers in the front and in the back that are tried."""
NEED_TIERS = {("sync.mode", "hierarchical"), ("sync.inner", "tier")}
"""Names that change nothing, or nothing for the better, where all devices share a node."""
TRIES_PER_CANDIDATE = 20
"""Random draws per requested candidate before the space counts as used up."""
DRAWS = 64
"""Draws of what the simulator does not know, for which good candidates are looked for."""


def propose(
    space: KnobSpace, workload: WorkloadProfile, cluster: Cluster, *, count: int, seed: int
) -> tuple[Strategy, ...]:
    """Up to `count` distinct legal strategies with one rank per device; index 0 is the default.

    First each choice of a name for the mapping and all of them together. Then, with all of them, from each other choice
    of a name and every pair of such choices (hierarchical exchanges with half-width gradients on the slow tier, local
    SGD with a sparsifying codec, ...) those that promise most: each is the one that by the simulator most improves on
    the best of those before it, on average over what the simulator does not know. Last random combinations drawn from
    the seed. Names that change nothing on this cluster are left out. Equal arguments give equal candidates. Fewer are
    returned when the space has no more. Raises IllegalStrategy when even the default cannot run, because the cluster
    has more devices than the global batch has samples.
    """
    runs = _Runs(workload, cluster)
    runs.check(space.default)

    def legal(settings: Settings) -> Strategy | None:
        try:
            strategy = space.strategy(settings, world_size=cluster.size)
            runs.check(strategy)
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
    found = dict.fromkeys([space.default, *filter(None, map(legal, mapping))])
    combined = [
        [
            strategy
            for variant in _variants(space, values, choice)
            if (strategy := legal(together | variant)) is not None
        ]
        for choice in _combinations(others)
    ]
    found |= dict.fromkeys(_promising(workload, cluster, [*found], combined, round(SYSTEMATIC * count) - len(found)))
    random = (_random(space, values, together, rng) for _ in range(TRIES_PER_CANDIDATE * count))
    for settings in random:
        if len(found) >= count:
            break
        strategy = legal(settings)
        if strategy is not None:
            found[strategy] = None
    return tuple(found)[:count]


def _promising(
    workload: WorkloadProfile,
    cluster: Cluster,
    found: Sequence[Strategy],
    variants: Sequence[Sequence[Strategy]],
    count: int,
) -> list[Strategy]:
    """Up to `count` strategies, one of the variants of a combination each, that one after the other add most to those
    found before; in the order of the combinations, so that places say nothing."""
    new = list(dict.fromkeys(strategy for each in variants for strategy in each if strategy not in found))
    if count <= 0 or not new:
        return []
    prediction = simulate(workload, cluster, [*found, *new], _prior())
    all_gains = np.where(prediction.failed, 0.0, np.log(prediction.goodput / prediction.goodput[0]))
    best, gains = all_gains[: len(found)].max(axis=0), all_gains[len(found) :]
    means, rows = gains.mean(axis=1), {strategy: row for row, strategy in enumerate(new)}
    known = ([rows[strategy] for strategy in each if strategy in rows] for each in variants)
    left = list(dict.fromkeys(max(each, key=means.__getitem__) for each in known if each))
    chosen: list[int] = []
    while left and len(chosen) < count:
        added = np.maximum(best, gains[left]).mean(axis=1)
        # Where nothing improves on the best, what comes closest.
        place = int(np.lexsort((means[left], added))[-1])
        chosen.append(left.pop(place))
        best = np.maximum(best, gains[chosen[-1]])
    return [new[row] for row in sorted(chosen)]


@cache
def _prior() -> Unknowns:
    return Unknowns.sample(np.random.default_rng(0), DRAWS)


class _Runs:
    """Knows whether strategies can run on a cluster. Most have their mapping in common."""

    def __init__(self, workload: WorkloadProfile, cluster: Cluster) -> None:
        self._workload = workload
        self._cluster = cluster
        self._refusals: dict[tuple[KnobValue | None, ...], IllegalStrategy | None] = {}

    def check(self, strategy: Strategy) -> None:
        """Raise IllegalStrategy where a rank would be left without a sample or a reducer without a device."""
        key = tuple(strategy.get(name) for name in (*sorted(MAPPING), "mapping.reducers"))
        if key not in self._refusals:
            try:
                self._run(strategy)
            except IllegalStrategy as error:
                self._refusals[key] = error
            else:
                self._refusals[key] = None
        if (refusal := self._refusals[key]) is not None:
            raise refusal

    def _run(self, strategy: Strategy) -> None:
        cluster = self._cluster
        order = device_order(strategy, cluster, cluster.size)
        batch_shares(strategy, cluster, order, self._workload.global_batch)
        (completed,) = complete([strategy])
        reducer_devices(completed, cluster, order)


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
    if knob.name == "precision.phases":
        # What a trial of a few steps measured of a strategy would be a mixture of its stages.
        return (knob.default,)
    if knob.name == "sync.layer_periods":
        return (knob.default, *LAYER_PERIODS)
    values = knob.domain.grid(GRID)
    if knob.name == "precision.compute":
        kinds = {device.kind for device in cluster.devices}
        return tuple(value for value in values if RECIPES.get(str(value)).missing(kinds) is None)
    return values if cluster.tiers else tuple(value for value in values if (knob.name, value) not in NEED_TIERS)


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


def _combinations(choices: Sequence[Settings]) -> Iterator[Settings]:
    """Nothing, each choice, and each pair."""
    pairs = (a | b for a, b in itertools.combinations(choices, 2) if a.keys() != b.keys())
    return itertools.chain([{}], choices, pairs)


def _variants(space: KnobSpace, values: Values, settings: Settings) -> Iterator[Settings]:
    """The settings as they are, and with each other name of each knob with names that they bring into use."""
    yield settings
    every = {**space.default, **settings}
    for knob in space.knobs:
        if knob.requires is not None and isinstance(knob.domain, Categorical) and space.in_use(knob, every):
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
