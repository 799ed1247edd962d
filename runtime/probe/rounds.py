"""Who exchanges with whom, when every pair of nodes is to be measured in few rounds."""

from collections.abc import Sequence
from itertools import pairwise

Pair = tuple[int, int]


def tournament(count: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which each two of `count` players meet once: count - 1 rounds, or count if it is odd.

    The circle method: one player stays, the others move around the table.
    """
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(a, b) for a, b in facing if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def ring(members: Sequence[int]) -> list[Pair]:
    """Every member sends to the next one, the last to the first; nothing for a single one."""
    return [*pairwise(members), (members[-1], members[0])] if len(members) > 1 else []


def shift(groups: Sequence[Sequence[int]], by: int) -> list[Pair]:
    """Every member of every group sends to one of the group that is `by` places on, all evenly spread."""
    flows = []
    for index, group in enumerate(groups):
        others = groups[(index + by) % len(groups)]
        size = max(len(group), len(others))
        flows += [(group[place % len(group)], others[place % len(others)]) for place in range(size)]
    return flows
