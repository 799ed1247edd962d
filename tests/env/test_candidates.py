"""Candidates are legal, distinct, reproducible and fit the cluster."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.env.candidates import propose
from paceline.env.scenarios import random_cluster, random_workload
from paceline.runtime.compress import CODECS
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Boolean, Categorical, KnobValue
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.knobs import knob_space
from paceline.runtime.mapping import batch_shares, device_order, ring_rate

ClusterOf = Callable[..., Cluster]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 48))
def test_candidates_are_legal_and_distinct(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(rng)
    check(workload, random_cluster(rng, workload), count, seed)


@pytest.mark.parametrize("devices", [2, 3, 8, 16, 33, 64])
def test_candidates_fit_clusters_of_any_size(workload: WorkloadProfile, cluster_of: ClusterOf, devices: int) -> None:
    nodes = [chr(ord("a") + index % 8) for index in range(devices)]
    flops = tuple((4e9, 2e9, 1e9)[index % 3] for index in range(devices))
    cluster = cluster_of(*nodes, flops=flops, racks=("aceg", "bdfh") if devices > 2 else ("a", "b"))
    check(dataclasses.replace(workload, global_batch=256), cluster, 32, 0)


def check(workload: WorkloadProfile, cluster: Cluster, count: int, seed: int) -> None:
    """Propose, and check what holds for any candidates."""
    space = knob_space()
    candidates = propose(space, workload, cluster, count=count, seed=seed)
    assert candidates[0] == space.default
    assert len(candidates) == len(set(candidates)) == count
    rate = ring_rate(cluster, range(cluster.size))
    for strategy in candidates:
        assert space.strategy(strategy, world_size=cluster.size) == strategy
        order = device_order(strategy, cluster, cluster.size)
        assert sum(batch_shares(strategy, cluster, order, workload.global_batch)) == workload.global_batch
        assert strategy["mapping.order"] == "scheduler" or ring_rate(cluster, order) > rate
        assert strategy["sync.mode"] != "hierarchical" or cluster.tiers
        assert strategy["compress.tier"] == "all" or strategy["compress.codec"] != "none"
    assert propose(space, workload, cluster, count=count, seed=seed) == candidates


def test_only_the_random_part_depends_on_the_seed(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    first, second = (propose(space, workload, cluster_of("a", "a"), count=32, seed=seed) for seed in (1, 2))
    assert first[:16] == second[:16]
    assert not set(first[16:]) & set(second[16:])
    # Combinations of two names, no two of them for the sake of a third.
    names = [(s["sync.mode"], s["compress.codec"], s["precision.compute"]) for s in first[:16]]
    assert len(set(names)) == 16


def test_the_promising_are_proposed(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    """Where the network is slow, what spares it; where it is fast, what computes faster."""
    slow, fast = (
        propose(space, dataclasses.replace(workload, flops_per_sample=flops), cluster, count=12, seed=0)
        for flops, cluster in ((1e4, cluster_of(*"abcd", bandwidth=1e5)), (1e9, cluster_of(*"abcd", bandwidth=1e10)))
    )
    assert all(s["compress.codec"] != "none" or s["sync.mode"] in ("local_sgd", "diloco") for s in slow[1:6])
    assert any(s["precision.compute"] == "bf16" for s in fast[1:6])
    assert all(s["compress.codec"] == "none" for s in fast[1:6])


def test_a_small_space_gives_fewer(workload: WorkloadProfile, cluster_of: ClusterOf, space: KnobSpace) -> None:
    mapping = [knob for knob in space.knobs if knob.name in ("mapping.order", "mapping.batch_share")]
    codec = Knob(name="compress.codec", doc="", domain=Categorical(choices=("none", "fp16")), default="none")
    flag = Knob(name="data.cache", doc="", domain=Boolean(), default=False)
    small = KnobSpace(knobs=(codec, flag, *mapping))
    assert len(propose(small, workload, cluster_of("a", "a"), count=32, seed=0)) == 4


def changes(space: KnobSpace, workload: WorkloadProfile, cluster: Cluster) -> list[dict[str, KnobValue]]:
    """What each of 32 candidates changes of the default."""
    return [s.differences(space.default) for s in propose(space, workload, cluster, count=32, seed=0)]


def test_batch_shares_follow_speed(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    assert {"mapping.batch_share": "proportional"} in changes(space, workload, cluster_of("a", "a", flops=(3e9, 1e9)))
    alike = changes(space, workload, cluster_of("a", "a", flops=(1.04e9, 1e9)))
    assert not any("mapping.batch_share" in change for change in alike)


def test_groups_of_devices_are_brought_together(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    apart = changes(space, workload, cluster_of(*"abcd", racks=("ac", "bd")))
    assert {"mapping.order": "topology"} in apart
    together = changes(space, workload, cluster_of(*"dbca", racks=("ac", "bd")))
    assert not any("mapping.order" in change for change in together)


def test_mapping_is_combined_with_what_depends_on_it(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    mapping = {"mapping.order": "topology", "mapping.batch_share": "proportional"}
    found = changes(space, workload, cluster_of(*"abcd", racks=("ac", "bd"), flops=(1e9, 1e9, 1e9, 2e9)))
    assert mapping in found
    combined = [change for change in found if mapping.items() <= change.items()]
    assert len(combined) >= 16
    assert any(change.get("sync.mode") == "hierarchical" for change in combined)
    # Numbers get their chance in what is left.
    assert sum(any(isinstance(value, float) for value in change.values()) for change in found) >= 4


def test_what_cannot_run_is_not_proposed(space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    found = propose(space, workload, cluster_of(*"abcd"), count=200, seed=0)
    # All devices run ranks, no CPU has these formats, and there are no tiers.
    assert {strategy["mapping.reducers"] for strategy in found} == {"beside"}
    assert not {"tf32", "fp8"} & {strategy["precision.compute"] for strategy in found}
    assert {strategy["sync.inner"] for strategy in found} == {"none"}
    modes = {strategy["sync.mode"] for strategy in found}
    assert modes == {"allreduce", "async", "diloco", "local_sgd", "reduction_server"}
    assert {strategy["compress.codec"] for strategy in found} == set(CODECS.names())
    assert len({strategy["sync.layer_periods"] for strategy in found}) == 3


def test_more_devices_than_samples_is_refused(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    with pytest.raises(IllegalStrategy, match="use at most 16 ranks"):
        propose(space, workload, cluster_of(*"a" * 17), count=8, seed=0)
