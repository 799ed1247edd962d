"""`paceline recommend`: ask a served policy."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from paceline.runtime.errors import InvalidRequest
from paceline.tuner.cli.options import Json, WorkloadName


def recommend(
    workload: WorkloadName,
    *,
    policy: Annotated[str, typer.Option("--policy", metavar="HOST:PORT", help="A policy server.", show_default=False)],
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="HOST:PORT", help="The runtime whose cluster is meant.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="A cluster profile as JSON, instead of a runtime.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the candidates that the policy ranks.")] = 0,
    json_output: Json = False,
) -> None:
    """Ask a served policy which strategy to try first for WORKLOAD on a cluster."""
    from paceline.runtime.probe.store import read_cluster
    from paceline.tuner.cli.target import find_runtime
    from paceline.tuner.policy.client import PolicyClient

    if (runtime is None) == (cluster is None):
        raise InvalidRequest("the cluster must be named once: --runtime HOST:PORT or --cluster FILE")
    profile = read_cluster(cluster) if cluster else None
    target = find_runtime(runtime, None)
    target.strategy(workload)
    if profile is None:
        with target.open() as opened:
            profile = opened.describe_cluster()
    with PolicyClient(policy) as client:
        found = client.recommend(
            space=target.space,
            workload=target.profile(workload),
            cluster=profile,
            trials=(),
            remaining=1,
            seed=seed,
        )
    if json_output:
        answer = {
            "workload": workload,
            "cluster": profile.name,
            "strategy": dict(found.strategy),
            "expected_gain": found.expected_gain,
            "uncertainty": found.uncertainty,
            "policy_digest": found.policy_digest,
        }
        print(json.dumps(answer, allow_nan=False))
    else:
        low, high = (found.expected_gain * math.exp(sign * 1.96 * found.uncertainty) for sign in (-1, 1))
        print(found.strategy.describe(target.space.default))
        print(f"expected goodput: {found.expected_gain:.2f} [{low:.2f}, {high:.2f}] times that of the default")
