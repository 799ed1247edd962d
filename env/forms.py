"""Who sends how much to whom in each form of an exchange.

Senders and receivers are ranks, followed by the reducers where there are some. Amounts are parts of what is exchanged.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

RECENT = 256
"""Forms of each kind that are kept: most depend on the number of ranks alone."""


@dataclass(frozen=True, eq=False)
class Form:
    """N flows on a few legs, which follow each other or work at once on different chunks."""

    leg: Ints
    """Leg of each flow, [N]."""
    sender: Ints
    """Who sends, [N]."""
    receiver: Ints
    """Who receives, [N]."""
    amount: Floats
    """How much, [N]."""
    shares: tuple[float, ...]
    """Largest part that a rank encodes, by leg; 0 where nothing is sent."""
    rounds: tuple[float, ...]
    """Messages that a rank sends after each other, relative to a ring of all ranks, by leg."""


def _form(flows: Iterable[tuple[int, int, int, float]], shares: Sequence[float], rounds: Sequence[float]) -> Form:
    leg, sender, receiver, amount = np.array([*flows], dtype=np.float64).reshape(-1, 4).T
    return Form(
        leg.astype(np.intp), sender.astype(np.intp), receiver.astype(np.intp), amount, tuple(shares), tuple(rounds)
    )


@lru_cache(RECENT)
def ring(ranks: int) -> Form:
    """An all-reduce in which every rank sends to the next one."""
    return rings((0,) * ranks)


@lru_cache(RECENT)
def rings(groups: tuple[Hashable, ...]) -> Form:
    """An all-reduce in each group on its own, given the group of each rank."""
    members = [[rank for rank, group in enumerate(groups) if group == each] for each in dict.fromkeys(groups)]
    flows = [
        (0, rank, group[(place + 1) % len(group)], 2 * (len(group) - 1) / len(group))
        for group in members
        if len(group) > 1
        for place, rank in enumerate(group)
    ]
    longest = max(len(group) for group in members)
    return _form(flows, [float(longest > 1)], [(longest - 1) / max(1, len(groups) - 1)])


@lru_cache(RECENT)
def pairs(ranks: int) -> Form:
    """An all-reduce in which every rank sums a part, to which all others send directly and which it sends to all."""
    both = itertools.permutations(range(ranks), 2)
    return _form(((0, rank, peer, 2 / ranks) for rank, peer in both), [float(ranks > 1)], [float(ranks > 1)])


@lru_cache(RECENT)
def reducers(ranks: int, count: int) -> Form:
    """Every rank sends a part to each reducer (first leg), which sends the sum back (second leg)."""
    between = list(itertools.product(range(ranks), range(ranks, ranks + count)))
    there = [(0, rank, reducer, 1 / count) for rank, reducer in between]
    back = [(1, reducer, rank, 1 / count) for rank, reducer in between]
    return _form([*there, *back], [1.0, 0.0], [count / max(1, ranks - 1)] * 2)


@lru_cache(RECENT)
def shards(owners: int, parts: tuple[float, ...]) -> Form:
    """Gradients to the first `owners` ranks (first leg) and parameters back (second leg), in one step.

    `parts` is how many gradients each rank makes for a step, one on average.
    """
    between = [(rank, owner) for rank in range(len(parts)) for owner in range(owners) if rank != owner]
    there = [(0, rank, owner, parts[rank] / owners) for rank, owner in between]
    back = [(1, owner, rank, parts[rank] / owners) for rank, owner in between]
    return _form([*there, *back], [1.0, 0.0], [float(len(parts) > 1)] * 2)


@lru_cache(RECENT)
def nested(levels: tuple[tuple[Hashable, ...], ...]) -> Form:
    """An all-reduce through groups inside groups, given the group of each rank at each level, the innermost first.

    At each level every group sums what its groups inside have summed, as `runtime.exchange.plan` lays it out; the last
    level, all ranks, goes without saying.
    """
    ranks = len(levels[0]) if levels else 0
    shares, rounds = ([0.0] * (len(levels) + 1) for _ in range(2))
    flows = []
    for level, rank, peer, peers, share, amount in _sendings(ranks, levels):
        flows.append((level, rank, peer, amount))
        shares[level] = max(shares[level], share)
        rounds[level] = max(rounds[level], peers / (ranks - 1))
    return _form(flows, shares, rounds)


def _sendings(ranks: int, levels: Sequence[Sequence[Hashable]]) -> Iterator[tuple[int, int, int, int, float, float]]:
    """What each rank sends at each level where it sends.

    Yields level, rank, one of the peers that it sends to (all of them are in other groups of the same level), the
    peers' number, the share of the payload that rank and peers sum up, and what the rank sends in all, as a share of
    the payload.
    """
    shares = [1.0] * ranks
    for level, (inner, outer) in enumerate(itertools.pairwise([range(ranks), *levels, (0,) * ranks])):
        teams: dict[Hashable, dict[Hashable, list[int]]] = {}
        for rank, labels in enumerate(zip(outer, inner, strict=True)):
            teams.setdefault(labels[0], {}).setdefault(labels[1], []).append(rank)
        # As many parts as the widest team has groups: in a narrower one some groups are responsible for several.
        parts = max(len(groups) for groups in teams.values())
        for groups in teams.values():
            members = list(groups.values())
            count = len(members)
            if count == 1:
                continue
            taken = [0] * count
            for part in range(parts):
                taken[part * count // parts] += 1
            for place, group in enumerate(members):
                following = members[(place + 1) % count]
                # The others' parts to them, and the sum of its own parts to each of them.
                sent = (parts - taken[place] + taken[place] * (count - 1)) / parts
                for seat, rank in enumerate(group):
                    share = shares[rank]
                    yield level, rank, following[seat % len(following)], count - 1, share, share * sent
                    shares[rank] = share * taken[place] / parts
