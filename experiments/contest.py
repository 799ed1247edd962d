"""What studies of whole strategies share: they take turns, seed by seed, each for the same time from the same start."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.resumable import Results
from paceline.runtime.api import RuntimeAPI, run_to_result
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

Run = Mapping[str, Any]
"""What a trial measured; see `train`."""


def train(
    runtime: RuntimeAPI, workload: str, settings: Sequence[str], *, seed: int, seconds: float, evaluations: int = 8
) -> dict[str, Any]:
    """Train for a time: what came of it, as JSON. `curve` has (seconds, samples, held-out loss)."""
    space = runtime.describe_knobs()
    result = run_to_result(
        runtime,
        TrialSpec(
            workload=workload,
            strategy=space.strategy(space.parse(list(settings))),
            budget=Budget(seconds=seconds),
            seed=seed,
            evaluations=evaluations,
        ),
    )
    return {
        "failure": result.failure,
        "examples_per_second": result.examples_per_second,
        "curve": [(point.seconds, point.samples, point.loss) for point in result.heldout_curve],
        "wire_bytes_per_sample": sum(result.wire_bytes.values()) / max(1, result.samples),
        "staleness": result.staleness,
        "load_balance_error": result.load_balance_error,
        "step_seconds": result.step_seconds.total,
    }


def run_all(
    results: Results,
    cluster: str,
    workload: str,
    strategies: Mapping[str, Sequence[str]],
    *,
    seeds: int,
    seconds: float,
) -> dict[str, list[Run]]:
    """Run what is missing; the runs of each strategy, by seed."""
    keys = {
        (name, seed): f"{cluster}, {workload}, {name}, seed {seed}"
        for seed, name in itertools.product(range(seeds), strategies)
    }
    if any(key not in results.entries for key in keys.values()):
        with EmbeddedRuntime(f"lab:{cluster}") as runtime:
            # The first trial of a runtime is slower: CPU quotas also bind what every process does for the first time.
            train(runtime, workload, [], seed=0, seconds=min(10.0, seconds), evaluations=1)
            for (name, seed), key in keys.items():
                settings = strategies[name]
                results.get(key, lambda s=settings, n=seed: train(runtime, workload, s, seed=n, seconds=seconds))
    return {name: [results.entries[keys[name, seed]] for seed in range(seeds)] for name in strategies}


def loss_at(run: Run, *, seconds: float | None = None, samples: float | None = None) -> float:
    """Held-out loss after a time or so many samples, by linear interpolation; infinite where the trial ended before."""
    column, target = (0, seconds) if samples is None else (1, samples)
    assert target is not None
    for before, after in itertools.pairwise(run["curve"]):
        if before[column] <= target <= after[column]:
            part = (target - before[column]) / max(after[column] - before[column], 1e-12)
            return float(before[2] + part * (after[2] - before[2]))
    # A trial ends with its last step, which need not be when its time is up.
    last = run["curve"][-1]
    return float(last[2]) if not run["failure"] and last[column] >= 0.9 * target else float("inf")


def seconds_to(run: Run, loss: float) -> float:
    """Time until the held-out loss first is as low, by linear interpolation; infinite where it never is."""
    for before, after in itertools.pairwise(run["curve"]):
        if after[2] <= loss <= before[2]:
            part = (before[2] - loss) / max(before[2] - after[2], 1e-12)
            return float(before[0] + part * (after[0] - before[0]))
    return 0.0 if run["curve"][0][2] <= loss else float("inf")
