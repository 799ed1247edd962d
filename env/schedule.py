"""When strategies exchange, and how far replicas drift meanwhile: what follows from the knobs of sync modes alone."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.env.forms import Floats
from paceline.runtime.domain.domains import KnobValue, parse_integers
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import knob_space
from paceline.runtime.sync.parts import EVEN

Bools = npt.NDArray[np.bool_]

BACKWARD = 2 / 3
"""Part of forward and backward that is backward."""


def complete(strategies: Sequence[Strategy]) -> Sequence[Strategy]:
    """Strategies of one space, with the defaults of knobs that this process has and the space has not."""
    missing = {name: value for name, value in knob_space().default.items() if name not in strategies[0]}
    return [Strategy.of({**strategy, **missing}) for strategy in strategies] if missing else strategies


class Columns:
    """The values of each knob of S strategies of one space, by strategy."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        # Strategies of one space have the same knobs in the same places.
        self._places = {name: place for place, (name, _) in enumerate(strategies[0].items_)}
        self._items = [strategy.items_ for strategy in strategies]

    def __getitem__(self, name: str) -> list[KnobValue]:
        """The values of a knob."""
        place = self._places[name]
        return [items[place][1] for items in self._items]

    def starting(self, beginning: str) -> list[list[KnobValue]]:
        """The values of each knob whose name begins so."""
        return [self[name] for name in self._places if name.startswith(beginning)]

    def numbers(self, name: str, *, where: Bools, otherwise: float) -> Floats:
        """The values of a knob where it is in use, [S]."""
        if not where.any():
            return np.full(len(where), otherwise)
        return np.where(where, np.array(self[name], dtype=np.float64), otherwise)


class Schedule(NamedTuple):
    """Fields as in Demand, unless stated; all [S]."""

    buckets: Floats
    inner_buckets: Floats
    """Buckets of what groups of ranks exchange every step."""
    period: Floats
    slack: Floats
    hideable: Floats
    hidden_behind: Floats
    due: Floats
    """Part of all parameters that an exchange is about, mean over exchanges."""
    at_once: Floats
    """The same of the step with most."""
    local_steps: Floats
    """Steps that a replica goes its own way, mean over layers."""
    rested_steps: Floats
    outer_rate: Floats
    stale: Floats
    """Updates that a gradient may lack."""
    asynchronous: Bools
    """Whether ranks do not wait for each other."""
    inner: Bools
    """Whether groups of ranks average gradients every step besides."""
    damped: Bools


def schedule(workload: WorkloadProfile, knobs: Columns, *, owners: int) -> Schedule:
    """Work it out; `owners` is how many ranks keep a shard of the parameters where they are sharded."""
    mode = np.array(knobs["sync.mode"])
    sharded, diloco = mode == "async", mode == "diloco"
    local = diloco | (mode == "local_sgd")
    inner = local & (np.array(knobs["sync.inner"]) == "tier")
    period = knobs.numbers("sync.period", where=local, otherwise=1.0)
    fragments = knobs.numbers("sync.fragments", where=local, otherwise=1.0)
    delay = knobs.numbers("sync.delay", where=local, otherwise=0.0)
    stale = knobs.numbers("sync.staleness", where=sharded, otherwise=0.0)
    rarity = np.array([_rarity(value) for value in knobs["sync.layer_periods"]])
    due, times = rarity.T
    # No averaging outlasts its period.
    delay = np.minimum(delay, period * times - 1)

    # A parameter tensor is never split, so there are at most as many buckets as tensors.
    most = workload.parameter_tensors
    size = np.array(knobs["sync.bucket_mb"], dtype=np.float64) * 2**20
    filled = np.minimum(most, np.ceil(workload.gradient_bytes / size))
    buckets = np.where(sharded, owners, np.minimum(most, np.maximum(filled, fragments)))

    # The first bucket is full only after its part of the backward pass, and the last only when that is over.
    between_buckets = 1 - 1 / filled
    late = (delay > 0) | (stale > 0)
    covered = np.minimum(period, fragments * delay) * np.where(inner, 1 - BACKWARD, 1.0)
    momentum = knobs.numbers("sync.outer_momentum", where=diloco, otherwise=0.0)
    outer_lr = knobs.numbers("sync.outer_lr", where=diloco, otherwise=0.0)
    return Schedule(
        buckets=buckets,
        inner_buckets=filled,
        period=period,
        slack=np.where(sharded, stale, delay / period),
        hideable=np.where(local | sharded, late, between_buckets),
        hidden_behind=np.where(local, covered, np.where(sharded, 1.0, BACKWARD)),
        due=due,
        at_once=1 / np.minimum(fragments, buckets),
        local_steps=np.where(local, period * times + delay - 1, 0.0),
        rested_steps=np.where(local, 0.0, times - 1),
        outer_rate=outer_lr / (1 - momentum),
        stale=stale,
        asynchronous=stale > 0,
        inner=inner,
        damped=sharded & np.array(knobs["sync.damped"], dtype=np.bool_),
    )


def _rarity(layer_periods: KnobValue) -> tuple[float, float]:
    """Part of all exchanges that a layer takes part in, and one in how many that is; means over layers."""
    if layer_periods == EVEN:
        return 1.0, 1.0
    periods = parse_integers(str(layer_periods))
    return sum(1 / each for each in periods) / len(periods), sum(periods) / len(periods)
