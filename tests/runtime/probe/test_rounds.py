"""Who exchanges with whom."""

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.probe.rounds import ring, shift, tournament


@given(st.integers(2, 64))
def test_every_two_meet_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    rounds = tournament(count)
    assert len(rounds) == count - 1 + count % 2
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(set(players)) == len(players)
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert met == Counter(frozenset(pair) for pair in combinations(range(count), 2))


def test_ring_goes_around_and_a_single_one_is_none() -> None:
    assert ring([4, 2, 7]) == [(4, 2), (2, 7), (7, 4)]
    assert ring([4, 2]) == [(4, 2), (2, 4)]
    assert ring([4]) == []


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
def test_shift_lets_every_member_send_to_the_other_group_evenly(sizes: list[int], data: st.DataObject) -> None:
    places = iter(range(sum(sizes)))
    groups = [[next(places) for _ in range(size)] for size in sizes]
    by = data.draw(st.integers(1, len(groups) - 1))
    flows = shift(groups, by)
    for index, group in enumerate(groups):
        others = groups[(index + by) % len(groups)]
        own = [(source, target) for source, target in flows if source in group]
        sent, received = (Counter(flow[end] for flow in own) for end in (0, 1))
        assert (set(sent), set(received)) == (set(group), set(others))
        for counts in (sent, received):
            assert max(counts.values()) - min(counts.values()) <= 1
