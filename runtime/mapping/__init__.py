"""Where ranks run and how much each does: rank orders (mappers) and batch shares. One file per rule."""

from paceline.runtime.domain.domains import PerRank
from paceline.runtime.domain.knobs import Knob
from paceline.runtime.mapping.base import MAPPERS, SHARES, batch_shares, device_order
from paceline.runtime.mapping.levels import Level, grouping, ring_rate, tier_levels, traffic_between
from paceline.runtime.mapping.reducers import reducer_devices

MAPPERS.load()


def knobs() -> list[Knob]:
    """`mapping.order` and `mapping.batch_share`."""
    return [
        Knob(
            name="mapping.order",
            doc="Device of each rank: a mapper's name, or a permutation of device indices, by rank.",
            domain=PerRank(named=MAPPERS.names(), permutation=True),
            default="scheduler",
        ),
        Knob(
            name="mapping.batch_share",
            doc="Samples of each rank in a global batch: a rule's name, or positive weights, by rank.",
            domain=PerRank(named=SHARES.names(), permutation=False),
            default="even",
        ),
    ]


__all__ = [
    "MAPPERS",
    "SHARES",
    "Level",
    "batch_shares",
    "device_order",
    "grouping",
    "knobs",
    "reducer_devices",
    "ring_rate",
    "tier_levels",
    "traffic_between",
]
