"""Racks are found in what nodes reach while all exchange, and none where there are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.probe.racks import Floats, find_racks

NOISE = 0.15
UPLINK = 0.25
"""Rate between racks, relative to that inside, without contention."""


def noisy(rng: np.random.Generator, rates: Floats) -> Floats:
    return rates * rng.uniform(1 - NOISE, 1 + NOISE, rates.shape)


def racked(rng: np.random.Generator, sizes: list[int]) -> tuple[Floats, set[frozenset[int]]]:
    """Rates between nodes in any order, and their racks."""
    count = sum(sizes)
    names = rng.permutation(count)
    rack_of = np.empty(count, int)
    rack_of[names] = np.repeat(np.arange(len(sizes)), sizes)
    crossing = UPLINK * rng.choice([1, 1 / 2, 1 / 4], (count, count))
    rates = np.where(np.equal.outer(rack_of, rack_of), 1.0, crossing)
    racks = {frozenset(np.flatnonzero(rack_of == rack).tolist()) for rack in range(len(sizes))}
    return noisy(rng, 5e7 * rates), racks


def found(rates: Floats) -> set[frozenset[int]]:
    return {frozenset(rack) for rack in find_racks(rates)}


SIZES = st.lists(st.integers(2, 12), min_size=2, max_size=8).filter(lambda sizes: sum(sizes) <= 64)


@pytest.mark.parametrize("sizes", [[4, 4], [3, 5], [2, 2, 4], [2, 2], [32, 32]], ids=str)
@given(seed=st.integers(0, 2**32))
def test_racks_are_found_through_contention_and_noise(sizes: list[int], seed: int) -> None:
    rates, racks = racked(np.random.default_rng(seed), sizes)
    assert found(rates) == racks


@given(SIZES, st.integers(0, 2**32))
def test_racks_of_any_sizes_are_found(sizes: list[int], seed: int) -> None:
    rates, racks = racked(np.random.default_rng(seed), sizes)
    assert found(rates) == racks


@given(st.integers(1, 64), st.integers(0, 2**32), st.sampled_from([1.0, 1 / 8]))
def test_equal_nodes_are_one_group_even_if_one_has_a_slow_link(count: int, seed: int, slow: float) -> None:
    rng = np.random.default_rng(seed)
    rates = np.full((count, count), 5e7)
    node = rng.integers(count)
    rates[node, :] *= slow
    rates[:, node] = rates[node, :]
    assert find_racks(noisy(rng, rates)) == [list(range(count))]


@given(st.integers(0, 2**32))
def test_a_pair_that_had_a_bad_moment_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates, racks = racked(rng, [4, 4])
    a, b = sorted(min(racks, key=min))[:2]
    rates[a, b] = rates[b, a] = 5e6
    assert found(rates) == racks
    flat = noisy(rng, np.full((8, 8), 5e7))
    flat[a, b] = flat[b, a] = 5e6
    assert len(find_racks(flat)) == 1


@given(st.integers(0, 2**32))
def test_a_node_that_few_uplinks_hold_back_is_put_where_none_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates, racks = racked(rng, [4, 4])
    own = min(racks, key=min)
    node, others = min(own), sorted(set(range(8)) - own)
    rates[node, :] = rates[:, node] = 5e6
    # Only two of the four paths to the other rack are crowded enough to be slower than the node itself.
    rates[node, others[:2]] = rates[others[:2], node] = 2.5e6
    assert found(rates) == racks
