"""Can a trial be trusted? The same strategy tried 6 times, alternating with another, from one snapshot.

    python -m experiments.repeatability.run

For each budget: the spread of examples/s, how often the reported 95 % interval holds the mean of all trials of the
strategy, and how often the faster strategy comes out ahead in a pair.
"""

import itertools
import statistics
from pathlib import Path

from experiments.resumable import Results, table
from paceline.runtime.api import run_to_result
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

HERE = Path(__file__).parent
WORKLOAD = "bytes-lm/small"
BUDGETS = (20, 40, 80)
REPEATS = 6
WARMUP = 5
STRATEGIES: dict[str, dict[str, KnobValue]] = {
    "default": {},
    "local SGD, period 8": {"sync.mode": "local_sgd", "sync.period": 8},
}


def main() -> None:
    """Run what is missing, then write the table."""
    results = Results(HERE)
    trials: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    with EmbeddedRuntime("local:4") as runtime:
        space = runtime.describe_knobs()
        # One start for all: the snapshot is taken anew by each process, from the same seed, so it is the same state.
        start = run_to_result(
            runtime,
            TrialSpec(
                workload=WORKLOAD,
                strategy=space.default,
                budget=Budget(steps=10),
                evaluations=1,
                snapshot_every=10,
            ),
        ).snapshot

        def trial(name: str, steps: int) -> tuple[float, float, float]:
            result = run_to_result(
                runtime,
                TrialSpec(
                    workload=WORKLOAD,
                    strategy=space.strategy(STRATEGIES[name]),
                    budget=Budget(steps=steps + WARMUP),
                    warmup_steps=WARMUP,
                    evaluations=1,
                    start_snapshot=start,
                ),
            )
            return result.examples_per_second, *result.examples_per_second_interval

        for steps, index, name in itertools.product(BUDGETS, range(REPEATS), STRATEGIES):
            found = results.get(f"{name}, {steps} steps, {index}", lambda: trial(name, steps))  # noqa: B023
            trials.setdefault((name, steps), []).append(tuple(found))

    rows = []
    for steps, name in itertools.product(BUDGETS, STRATEGIES):
        rates = [rate for rate, _, _ in trials[name, steps]]
        mean = statistics.fmean(rates)
        held = sum(low <= mean <= high for _, low, high in trials[name, steps])
        rows.append(
            [
                str(steps),
                name,
                f"{mean:.1f}",
                f"{(max(rates) - min(rates)) / mean:.1%}",
                f"{statistics.stdev(rates) / mean:.1%}",
                f"{held} of {REPEATS}",
                _wins(trials, steps) if name != "default" else "",
            ]
        )
    header = ["steps", "strategy", "mean examples/s", "(max - min)/mean", "std/mean", "interval holds mean", "ahead"]
    text = f"{WORKLOAD}, 4 ranks, {WARMUP} steps of warm-up left out.\n\n" + table(header, rows)
    (HERE / "table.md").write_text(text)
    print(text)


def _wins(trials: dict[tuple[str, int], list[tuple[float, float, float]]], steps: int) -> str:
    default, other = (trials[name, steps] for name in STRATEGIES)
    return f"{sum(b[0] > a[0] for a, b in zip(default, other, strict=True))} of {REPEATS}"


if __name__ == "__main__":
    main()
