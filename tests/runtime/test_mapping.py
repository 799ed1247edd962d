from collections.abc import Sequence
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.knobs import knob_space
from paceline.runtime.mapping import MAPPERS, SHARES, batch_shares, device_order


def cluster_of(size: int) -> Cluster:
    profile = DeviceProfile(flops=1e9, mem_bw=1e9, net_latency=0.0, pcie_bw=0.0, memory=1e9)
    devices = (Device(name=f"d{i}", node="n", kind="cpu", profile=profile) for i in range(size))
    return Cluster(name=f"test:{size}", devices=tuple(devices), links=())


def shares(weights: Sequence[int], global_batch: int) -> tuple[int, ...]:
    size = len(weights)
    strategy = Strategy.of({"mapping.batch_share": ",".join(map(str, weights))})
    return batch_shares(strategy, cluster_of(size), range(size), global_batch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 400))
def test_shares_keep_every_sample_and_stay_within_one_of_the_exact_share(weights: list[int], extra: int) -> None:
    global_batch = sum(weights) + extra
    result = shares(weights, global_batch)
    assert sum(result) == global_batch
    for share, weight in zip(result, weights, strict=True):
        exact = global_batch * weight / sum(weights)
        assert floor(exact) <= share <= ceil(exact)


def test_remainders_go_to_the_largest_fraction_and_on_a_tie_to_the_lower_rank() -> None:
    assert shares([5, 3, 2], 11) == (6, 3, 2)
    assert shares([1, 1, 1], 8) == (3, 3, 2)
    assert shares([1, 2, 4], 10) == (1, 3, 6)


def test_even_shares_of_a_batch_that_does_not_divide() -> None:
    strategy = knob_space().strategy({})
    assert batch_shares(strategy, cluster_of(4), range(4), 30) == (8, 8, 7, 7)


def test_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(IllegalStrategy, match="world size 4 is larger than the global batch of 3; use at most 3"):
        shares([1, 1, 1, 1], 3)


def test_a_rank_without_a_sample_is_refused() -> None:
    with pytest.raises(IllegalStrategy, match="leaves rank 1 without a sample"):
        shares([99, 1], 10)


@given(st.permutations(range(5)))
def test_an_explicit_order_is_taken_as_it_is(order: list[int]) -> None:
    settings = {"mapping.order": ",".join(map(str, order))}
    strategy = knob_space().strategy(settings, world_size=5)
    assert device_order(strategy, cluster_of(5), 5) == tuple(order)


@pytest.mark.parametrize("name", MAPPERS.names())
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_mapper_gives_each_rank_its_own_device(name: str, world_size: int) -> None:
    order = device_order(Strategy.of({"mapping.order": name}), cluster_of(4), world_size)
    assert len(set(order)) == world_size
    assert set(order) <= set(range(4))


@pytest.mark.parametrize("name", SHARES.names())
def test_every_batch_share_weighs_each_rank(name: str) -> None:
    weights = SHARES.get(name)().weights(cluster_of(4), (2, 0, 1))
    assert len(weights) == 3
    assert min(weights) > 0
