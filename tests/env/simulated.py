"""Random cases for the cost model, and draws of what it does not know."""

import dataclasses

import numpy as np

from paceline.env.candidates import propose
from paceline.env.scenarios import random_cluster, random_workload
from paceline.env.simulator import Unknowns
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import knob_space


def ideal(**values: float) -> Unknowns:
    """One draw in which everything is as probed and nothing is lost."""
    ones = (
        "compute_efficiency",
        "link_efficiency",
        "codec_cost",
        "bf16_speed",
        "fp16_speed",
        "memory_factor",
        "best_outer_rate",
    )
    known = {field.name: float(field.name in ones) for field in dataclasses.fields(Unknowns)}
    return Unknowns(**{name: np.array([value]) for name, value in (known | values).items()})


def scenario(seed: int) -> tuple[WorkloadProfile, Cluster, tuple[Strategy, ...], Unknowns]:
    """A random case with its candidates, and draws of the unknowns."""
    rng = np.random.default_rng(seed)
    workload = random_workload(rng)
    cluster = random_cluster(rng, workload)
    strategies = propose(knob_space(), workload, cluster, count=24, seed=seed)
    return workload, cluster, strategies, Unknowns.sample(rng, 16)
