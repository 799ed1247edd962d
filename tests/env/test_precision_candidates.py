"""Candidates compute only as the devices can, and at once."""

import dataclasses
from collections.abc import Callable

import pytest

from paceline.env.candidates import propose
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.workload import WorkloadProfile


@pytest.mark.parametrize(
    ("kind", "missing"), [("cpu", {"tf32", "fp8"}), ("cuda:7.0", {"tf32", "fp8"}), ("cuda:8.0", {"fp8"})]
)
def test_what_a_device_lacks_is_not_proposed(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: Callable[..., Cluster], kind: str, missing: set[str]
) -> None:
    cluster = cluster_of("a", "a")
    able, *others = (dataclasses.replace(device, kind="cuda:9.0") for device in cluster.devices)

    def proposed(*devices: object) -> set[object]:
        found = propose(space, workload, dataclasses.replace(cluster, devices=devices), count=200, seed=0)
        assert {strategy["precision.phases"] for strategy in found} == {"off"}
        return {strategy["precision.compute"] for strategy in found}

    everything = {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert proposed(able, *others) == everything
    # One device that cannot is enough.
    assert proposed(*others, dataclasses.replace(able, kind=kind)) == everything - missing
