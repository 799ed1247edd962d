"""Candidates are legal, distinct, reproducible and fit the cluster."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.env.candidates import propose
from paceline.env.scenarios import random_cluster, random_workload
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Boolean, Categorical
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.knobs import knob_space
from paceline.runtime.mapping import batch_shares, device_order

ClusterOf = Callable[..., Cluster]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 48))
def test_candidates_are_legal_and_distinct(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    space, workload = knob_space(), random_workload(rng)
    cluster = random_cluster(rng, workload)
    candidates = propose(space, workload, cluster, count=count, seed=seed)
    assert candidates[0] == space.default
    assert len(candidates) == len(set(candidates)) == count
    for strategy in candidates:
        assert space.strategy(strategy, world_size=cluster.size) == strategy
        shares = batch_shares(strategy, cluster, device_order(strategy, cluster, cluster.size), workload.global_batch)
        assert sum(shares) == workload.global_batch
    assert propose(space, workload, cluster, count=count, seed=seed) == candidates


def test_only_the_random_part_depends_on_the_seed(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    first, second = (propose(space, workload, cluster_of("a", "a"), count=32, seed=seed) for seed in (1, 2))
    assert first != second
    # Three codecs, local SGD and bf16 alone, and their seven pairs.
    assert first[:13] == second[:13]
    assert {"compress.codec": "bf16", "sync.mode": "local_sgd"} in [
        strategy.differences(space.default) for strategy in first[:13]
    ]


def test_a_small_space_gives_fewer(workload: WorkloadProfile, cluster_of: ClusterOf, space: KnobSpace) -> None:
    mapping = [knob for knob in space.knobs if knob.name.startswith("mapping.")]
    codec = Knob(name="compress.codec", doc="", domain=Categorical(choices=("none", "fp16")), default="none")
    flag = Knob(name="data.cache", doc="", domain=Boolean(), default=False)
    small = KnobSpace(knobs=(codec, flag, *mapping))
    assert len(propose(small, workload, cluster_of("a", "a"), count=32, seed=0)) == 4


def test_batch_shares_follow_speed(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    unequal = propose(space, workload, cluster_of("a", "a", flops=(3e9, 1e9)), count=32, seed=0)
    assert {"mapping.batch_share": "12,4"} in [strategy.differences(space.default) for strategy in unequal]
    nearly_equal = propose(space, workload, cluster_of("a", "a", flops=(1.04e9, 1e9)), count=32, seed=0)
    assert {strategy["mapping.batch_share"] for strategy in nearly_equal} == {"even"}


def test_devices_of_a_node_are_brought_together(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    apart = propose(space, workload, cluster_of("a", "b", "a", "b"), count=32, seed=0)
    assert {"mapping.order": "0,2,1,3"} in [strategy.differences(space.default) for strategy in apart]
    together = propose(space, workload, cluster_of("b", "b", "a", "a"), count=32, seed=0)
    assert {strategy["mapping.order"] for strategy in together} == {"scheduler"}


def test_more_devices_than_samples_is_refused(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    with pytest.raises(IllegalStrategy, match="use at most 16 ranks"):
        propose(space, workload, cluster_of(*"a" * 17), count=8, seed=0)
