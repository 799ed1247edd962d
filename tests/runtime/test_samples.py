"""The sample stream: permutations end to end, and ranges that tile."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.samples import SampleStream, rank_range


@given(st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 4))
def test_every_epoch_is_a_permutation(size: int, seed: int, epochs: int) -> None:
    stream = SampleStream(size, seed)
    indices = stream.indices(0, size * epochs)
    for epoch in range(epochs):
        assert sorted(indices[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@given(st.integers(1, 30), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_how_it_is_cut_makes_no_difference(size: int, cuts: list[int]) -> None:
    whole = SampleStream(size, 7).indices(0, sum(cuts) + 1)
    stream, position, pieces = SampleStream(size, 7), 0, []
    for cut in [*cuts, 1]:
        if cut:
            pieces.append(stream.indices(position, position + cut))
        position += cut
    assert torch.equal(torch.cat(pieces), whole)


def test_it_can_go_back() -> None:
    stream = SampleStream(10, 3)
    early = stream.indices(2, 8)
    stream.indices(95, 105)
    assert torch.equal(stream.indices(2, 8), early)


def test_seeds_and_epochs_differ() -> None:
    first, second = SampleStream(1000, 0), SampleStream(1000, 1)
    assert not torch.equal(first.indices(0, 1000), second.indices(0, 1000))
    assert not torch.equal(first.indices(0, 1000), first.indices(1000, 2000))


@given(st.integers(0, 1000), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_ranges_of_the_ranks_tile_the_step(cursor: int, shares: list[int]) -> None:
    ranges = [rank_range(cursor, shares, rank) for rank in range(len(shares))]
    assert ranges[0][0] == cursor
    assert ranges[-1][1] == cursor + sum(shares)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
