"""Generate the legal strategies that a tuning session chooses from.

Everything is derived from the knob space and the cluster: no knob is named here but those of the mapping, whose
legality depends on the workload.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import KnobValue, Number, PerRank
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.mapping.base import batch_shares, device_order

Settings = dict[str, KnobValue]
Values = Mapping[str, tuple[KnobValue, ...]]
"""The values to try of each knob, by name."""

GRID = 13
"""Values tried of a number knob."""
UNEVEN_FLOPS = 1.05
"""Ratio of fastest to slowest device from which batch shares by speed are proposed."""
TRIES_PER_CANDIDATE = 20
"""Random draws per requested candidate before the space counts as used up."""


def propose(
    space: KnobSpace, workload: WorkloadProfile, cluster: Cluster, *, count: int, seed: int
) -> tuple[Strategy, ...]:
    """Up to `count` distinct legal strategies with one rank per device; index 0 is the default.

    First each choice of a name or list on its own, then every pair of such choices (a local-SGD run with half-width
    gradients, a sparsifying codec on devices in node order, ...), then random combinations drawn from the seed. Equal
    arguments give equal candidates. Fewer are returned when the space has no more. Raises IllegalStrategy when even
    the default cannot run, because the cluster has more devices than the global batch has samples.
    """
    values = {knob.name: _values(knob, workload, cluster) for knob in space.knobs}
    _check_shares(space.default, workload, cluster)
    found = dict.fromkeys([space.default])
    rng = np.random.default_rng(seed)
    random = (_random(space, values, rng) for _ in range(TRIES_PER_CANDIDATE * count))
    for settings in itertools.chain(_choices_and_pairs(space, values), random):
        if len(found) >= count:
            break
        try:
            strategy = space.strategy(settings, world_size=cluster.size)
            _check_shares(strategy, workload, cluster)
        except IllegalStrategy:
            continue
        found[strategy] = None
    return tuple(found)


def _check_shares(strategy: Strategy, workload: WorkloadProfile, cluster: Cluster) -> None:
    """Raise IllegalStrategy where a rank would be left without a sample."""
    order = device_order(strategy, cluster, cluster.size)
    batch_shares(strategy, cluster, order, workload.global_batch)


def _values(knob: Knob, workload: WorkloadProfile, cluster: Cluster) -> tuple[KnobValue, ...]:
    values = knob.domain.grid(GRID)
    if isinstance(knob.domain, PerRank):
        lists = _orders(cluster) if knob.domain.permutation else _shares(workload, cluster)
        values += tuple(",".join(map(str, numbers)) for numbers in lists)
    return values


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The order that keeps the devices of a node together, where the launcher's does not."""
    order = range(cluster.size)
    grouped = sorted(order, key=lambda index: cluster.devices[index].node)
    crossings = [_crossings(cluster, indices) for indices in (order, grouped)]
    if crossings[1] < crossings[0]:
        yield tuple(grouped)


def _crossings(cluster: Cluster, order: Sequence[int]) -> int:
    """Neighbours in the order that sit in different nodes."""
    nodes = [cluster.devices[index].node for index in order]
    return sum(a != b for a, b in itertools.pairwise(nodes))


def _shares(workload: WorkloadProfile, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Batch shares in proportion to the devices' speed, where these differ."""
    flops = np.array([device.profile.flops for device in cluster.devices])
    if flops.max() > UNEVEN_FLOPS * flops.min():
        shares = np.maximum(1, np.rint(workload.global_batch * flops / flops.sum()))
        yield tuple(int(share) for share in shares)


def _choices_and_pairs(space: KnobSpace, values: Values) -> Iterator[Settings]:
    """Every value that is no number, of every knob that is always in use, alone and then in pairs."""
    choices: list[Settings] = [
        {knob.name: value}
        for knob in space.knobs
        if knob.requires is None and not isinstance(knob.domain, Number)
        for value in values[knob.name]
        if value != knob.default
    ]
    yield from choices
    for first, second in itertools.combinations(choices, 2):
        if first.keys() != second.keys():
            yield first | second


def _random(space: KnobSpace, values: Values, rng: np.random.Generator) -> Settings:
    """Each knob in use at its default or, equally likely, at any of its values."""
    settings = dict(space.default)
    # Selectors first, so that the knobs which depend on them know whether they are in use.
    for knob in sorted(space.knobs, key=lambda knob: knob.requires is not None):
        options = values[knob.name]
        pick = options[rng.integers(len(options))]
        if space.in_use(knob, settings) and rng.random() < 0.5:
            settings[knob.name] = pick
    return settings
