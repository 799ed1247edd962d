"""Who sends which part of a bucket to whom when ranks sit in nested groups.

Hierarchical all-reduce is a reduce-scatter inside every innermost group, then across the groups of the next level, and
so on outwards, followed by the all-gathers back inwards. Each level thus carries only what its inner groups have summed
already: with groups of m ranks, 1/m of the bucket per rank crosses between groups (Cho et al., "BlueConnect",
SysML 2019; Thakur et al., IJHPCA 19, 2005).

A bucket is cut into lanes, numbered by one digit per level, the innermost level's digit first. After the reduce-scatter
of a level, each of its groups holds every lane at exactly one rank. Groups need not be of equal size: where a group has
fewer children than the widest of its level, a child takes several digits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from paceline.runtime.mapping.levels import Level


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Lanes that travel between this rank and a peer; the direction is that of the list it stands in."""

    peer: int
    """The other rank."""
    first: int
    """First lane."""
    stop: int
    """Lane behind the last."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One reduce-scatter or all-gather, as one rank takes part in it."""

    level: int
    """Index of its level, 0 for the innermost."""
    reduces: bool
    """Whether what arrives is added to what is there (reduce-scatter) or replaces it (all-gather)."""
    sends: tuple[Transfer, ...]
    """To each peer, in rank order."""
    receives: tuple[Transfer, ...]
    """From each peer, in rank order."""
    holds: tuple[tuple[int, int], ...]
    """Lanes of which this rank holds its group's sum between the two stages of the level, as ranges of equal width;
    none at a rank whose group is summed elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A rank's part in a hierarchical all-reduce."""

    lanes: int
    """Lanes that a bucket is cut into."""
    levels: int
    """Levels at which something is exchanged."""
    stages: tuple[Stage, ...]
    """In order: reduce-scatter of the innermost level first, its all-gather last."""
    feeds_back: bool = True
    """Whether what encoding a sum drops can be added to a later bucket, as a rank that trains has encoded it."""

    @property
    def pipelines(self) -> bool:
        """Whether a chunk can be on one link while the next is on another: between levels, or to and from who adds up.
        Ranks that are all peers fill all their links at every stage."""
        return self.levels > 1 or not self.feeds_back

    @property
    def home(self) -> tuple[tuple[int, int], ...]:
        """Lanes whose total is complete at this rank before it is gathered; over all ranks each lane once, or never."""
        return self.stages[self.levels - 1].holds if self.stages else ((0, self.lanes),)


def make_reducer_plan(ranks: int, reducers: int, rank: int) -> Plan:
    """The part of `rank` where those behind the first `ranks` add up what these send, a lane each, and return it."""
    if rank < ranks:
        to_all = tuple(Transfer(peer=ranks + lane, first=lane, stop=lane + 1) for lane in range(reducers))
        push = Stage(level=0, reduces=True, sends=to_all, receives=(), holds=())
    else:
        lane = rank - ranks
        from_all = tuple(Transfer(peer=peer, first=lane, stop=lane + 1) for peer in range(ranks))
        push = Stage(level=0, reduces=True, sends=(), receives=from_all, holds=((lane, lane + 1),))
    reply = replace(push, reduces=False, sends=push.receives, receives=push.sends)
    return Plan(lanes=reducers, levels=1, stages=(push, reply), feeds_back=False)


class _Unit:
    """A rank, or a group with the units inside it, and who of it holds which lanes."""

    def __init__(self, children: "Sequence[_Unit]", radix: int, rank: int | None = None) -> None:
        self.children = children
        self.radix = radix
        self.rank = rank

    def child_for(self, digit: int) -> int:
        """Index of the child that is responsible for a digit."""
        return digit * len(self.children) // self.radix

    def holder(self, digits: tuple[int, ...]) -> int:
        """Rank that holds the unit's sum of the lanes which begin with these digits, one per level inside."""
        if self.rank is not None:
            return self.rank
        return self.children[self.child_for(digits[-1])].holder(digits[:-1])


def make_plan(levels: Sequence[Level], rank: int, world_size: int) -> Plan:
    """The part of `rank` among `world_size` ranks in nested `levels`, innermost first; the last level is all ranks.

    A level that groups nothing further than the one inside it is skipped.
    """
    units = [_Unit((), 1, each) for each in range(world_size)]
    home_of = list(range(world_size))
    layers: list[list[_Unit]] = []
    for labels in (*(level.groups for level in levels), (0,) * world_size):
        members: dict[int, list[int]] = {}
        for each in range(world_size):
            inside = members.setdefault(labels[each], [])
            if home_of[each] not in inside:
                inside.append(home_of[each])
        if len(members) == len(units):
            continue
        radix = max(len(inside) for inside in members.values())
        groups = [_Unit([units[index] for index in inside], radix) for inside in members.values()]
        numbers = {label: number for number, label in enumerate(members)}
        home_of = [numbers[labels[each]] for each in range(world_size)]
        units = groups
        layers.append(groups)
    radices = [layer[0].radix for layer in layers]
    lanes = math.prod(radices)
    reduce = [_stage(layer, level, radices, rank) for level, layer in enumerate(layers)]
    gather = [replace(stage, reduces=False, sends=stage.receives, receives=stage.sends) for stage in reversed(reduce)]
    return Plan(lanes=lanes, levels=len(layers), stages=(*reduce, *gather))


def _stage(layer: Sequence[_Unit], level: int, radices: Sequence[int], rank: int) -> Stage:
    """The reduce-scatter of a level. What a rank receives here is what it sends in the all-gather."""
    sends: dict[int, list[tuple[int, int]]] = {}
    receives: dict[int, list[tuple[int, int]]] = {}
    holds = []
    for unit in layer:
        for digits in product(*map(range, radices[: level + 1])):
            target = unit.holder(digits)
            if target == rank:
                holds.append(_lanes(digits, radices))
            for child in unit.children:
                source = child.holder(digits[:-1])
                if source != target and source == rank:
                    sends.setdefault(target, []).append(_lanes(digits, radices))
                elif source != target and target == rank:
                    receives.setdefault(source, []).append(_lanes(digits, radices))
    return Stage(
        level=level, reduces=True, sends=_transfers(sends), receives=_transfers(receives), holds=tuple(sorted(holds))
    )


def _lanes(digits: tuple[int, ...], radices: Sequence[int]) -> tuple[int, int]:
    """Range of the lanes that begin with these digits."""
    first = 0
    for digit, radix in zip(digits, radices, strict=False):
        first = first * radix + digit
    width = math.prod(radices[len(digits) :])
    return first * width, (first + 1) * width


def _transfers(by_peer: dict[int, list[tuple[int, int]]]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(peer=peer, first=first, stop=stop) for peer in sorted(by_peer) for first, stop in sorted(by_peer[peer])
    )
