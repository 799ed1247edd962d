"""Random clusters and workloads to train on: from loopback on one machine to GPUs behind slow links."""

import math

import numpy as np

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link
from paceline.runtime.domain.workload import WorkloadProfile

MAX_DEVICES = 16
"""Largest cluster that is drawn."""


def random_workload(rng: np.random.Generator) -> WorkloadProfile:
    """A workload of 1e4 to 1e8 parameters, log-uniform, each used up to a thousand times per sample."""
    parameters = int(_log_uniform(rng, 1e4, 1e8))
    samples = int(_log_uniform(rng, 1e3, 1e6))
    return WorkloadProfile(
        name="simulated",
        doc="A workload drawn for the simulator.",
        global_batch=int(2 ** rng.integers(4, 10)),
        train_samples=samples,
        heldout_samples=max(1, samples // 10),
        parameters=parameters,
        parameter_tensors=int(_log_uniform(rng, 4, 300)),
        flops_per_sample=6 * parameters * _log_uniform(rng, 1, 1000),
    )


def random_cluster(rng: np.random.Generator, workload: WorkloadProfile) -> Cluster:
    """A cluster of 2 to 16 devices on one or more nodes, alike or not.

    The links are drawn last, so that one exchange takes between 1/50 and 20 times as long as the computation that
    it belongs to: outside this range there is nothing to tune.
    """
    nodes, per_node = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    if nodes * per_node == 1:
        per_node = 2
    cuda = rng.random() < 0.3
    flops = _log_uniform(rng, 1e12, 1e14) if cuda else _log_uniform(rng, 2e9, 5e11)
    mem_bw = _log_uniform(rng, 2e11, 2e12) if cuda else _log_uniform(rng, 4e9, 4e10)
    names = [f"node{node}" for node in range(nodes)]
    homes = [node for node in names for _ in range(per_node)]
    if rng.random() < 0.3:
        rng.shuffle(homes)
    mixed = rng.random() < 0.5
    ratio = _log_uniform(rng, 0.02, 20.0)
    compute = workload.flops_per_sample * workload.global_batch / (flops * len(homes))
    bandwidth = float(np.clip(2 * workload.gradient_bytes / (compute * ratio), 1e6, 1e11))
    latency = _log_uniform(rng, 1e-5, 1e-3)
    devices = tuple(
        Device(
            name=f"{node}/{'cuda' if cuda else 'cpu'}{index}",
            node=node,
            kind="cuda" if cuda else "cpu",
            profile=DeviceProfile(
                flops=flops * (_log_uniform(rng, 0.33, 1.0) if mixed else 1.0),
                mem_bw=mem_bw,
                net_latency=latency * 2 * (len(homes) - 1),
                pcie_bw=1.2e10 if cuda else 0.0,
                memory=_log_uniform(rng, 2e9, 8e10),
            ),
        )
        for index, node in enumerate(homes)
    )
    inside = bandwidth * (_log_uniform(rng, 1.0, 20.0) if nodes > 1 else 1.0)
    links = tuple(
        Link(
            source=source,
            target=target,
            bandwidth=inside if source == target else bandwidth,
            alone=inside if source == target else bandwidth,
            latency=latency,
        )
        for source in names
        for target in names
    )
    return Cluster(name=f"simulated:{len(homes)}", devices=devices, links=links)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))
