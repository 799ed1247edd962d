"""Every sync mode and codec, on three clusters and two workloads, against plain data parallelism.

    python -m experiments.strategies.run [CLUSTER ...]        (as root)

Strategies take turns, seed by seed, each for the same time from the same start; what a results.json already has is not
run again, so the study may be stopped at any time. `default` is what users run today; `best order` the same with ranks
in the order that a ring likes best, which a careful user would find by hand.
"""

import itertools
import math
import statistics
import sys
from pathlib import Path

from experiments.contest import Run, loss_at, run_all, seconds_to
from experiments.resumable import Results, spread, table

HERE = Path(__file__).parent
SEEDS = 3
SECONDS = {
    ("two-racks", "bytes-lm/small"): 20.0,
    ("flat-fast", "bytes-lm/small"): 6.0,
    ("edge-wan", "bytes-lm/small"): 16.0,
    ("two-racks", "digits-cnn"): 3.0,
    ("flat-fast", "digits-cnn"): 2.0,
    ("edge-wan", "digits-cnn"): 3.0,
}
ORDER = "mapping.order=topology"
LOCAL = ["sync.mode=local_sgd", ORDER]
DILOCO = ["sync.mode=diloco", ORDER]
STRATEGIES = {
    "default": [],
    "best order": [ORDER],
    "best order, buckets of 1 MiB": [ORDER, "sync.bucket_mb=1"],
    "hierarchical": ["sync.mode=hierarchical", "sync.bucket_mb=1"],
    "reduction_server, beside": ["sync.mode=reduction_server", "sync.bucket_mb=1"],
    "async, staleness 2": ["sync.mode=async", "sync.staleness=2", ORDER],
    "async, staleness 2, int8": ["sync.mode=async", "sync.staleness=2", "compress.codec=int8", ORDER],
    "local_sgd, period 8": [*LOCAL],
    "local_sgd, period 32": [*LOCAL, "sync.period=32"],
    "local_sgd, period 8, inner tier": [*LOCAL, "sync.inner=tier"],
    "local_sgd, period 8, 4 fragments, delay 2": [*LOCAL, "sync.fragments=4", "sync.delay=2"],
    "diloco, period 16": [*DILOCO, "sync.period=16"],
    "diloco, period 16, int8": [*DILOCO, "sync.period=16", "compress.codec=int8"],
    "layer periods 1,1,2,4": [ORDER, "sync.layer_periods=1,1,2,4"],
    **{
        f"{codec}": [ORDER, f"compress.codec={codec}"]
        for codec in ("fp16", "bf16", "int8", "fp8", "sign", "topk", "randomk", "powersgd")
    },
    "hierarchical, int8 on the slow tier": [
        "sync.mode=hierarchical",
        "sync.bucket_mb=1",
        "compress.codec=int8",
        "compress.tier=slow",
    ],
}
EXACT = ("best order, buckets of 1 MiB", "hierarchical", "reduction_server, beside")
"""Synchronous modes that only add gradients up, with buckets of one size."""
EXACT_SEEDS = {("flat-fast", "bytes-lm/small"): 9}
"""Where these differ by less than three seeds can tell."""
PUBLISHED = {"default": "1.0x (synchronous)", "async, staleness 2": "1.41x", "async, staleness 2, int8": "1.67x"}
"""Of the text that proposes a reconstruction server: ResNet-50 on eight nodes of four A100, images/s."""


def rows_of(runs: dict[str, list[Run]], seconds: float) -> list[list[str]]:
    """One per strategy."""
    default = runs["default"]
    samples = [run["curve"][-1][1] for run in default]
    goals = [run["curve"][-1][2] for run in default]
    rows = []
    for name, mine in runs.items():
        failures = {run["failure"] for run in mine} - {None}
        if failures:
            rows.append([name, *[", ".join(sorted(failures))] * 6])
            continue
        times = [seconds_to(run, goal) for run, goal in zip(mine, goals, strict=True)]
        sooner = [seconds / each for each in times]
        rows.append(
            [
                name,
                spread([run["examples_per_second"] for run in mine]),
                spread([loss_at(run, seconds=seconds) for run in mine]),
                spread([loss_at(run, samples=count) for run, count in zip(mine, samples, strict=True)]),
                "not reached" if all(map(math.isinf, times)) else spread(times),
                spread(sooner),
                spread([run["wire_bytes_per_sample"] / 1e3 for run in mine]),
            ]
        )
    return rows


def lost(runs: dict[str, list[Run]]) -> str:
    """What the choice among exact modes costs at most."""
    speeds = {name: [run["examples_per_second"] for run in runs[name]] for name in EXACT}
    ranked = sorted(EXACT, key=lambda name: statistics.median(speeds[name]))
    worst, best = (statistics.median(speeds[name]) for name in (ranked[0], ranked[-1]))
    each = ", ".join(f"{name} {spread(speeds[name])}" for name in ranked)
    return (
        f"\nExamples/s of exact modes, {len(speeds[EXACT[0]])} seeds: {each}. "
        f"The slowest loses {1 - worst / best:.1%} to the fastest.\n"
    )


def published(runs: dict[str, list[Run]]) -> list[list[str]]:
    """The published ratios beside ours."""
    rows = []
    for name, theirs in PUBLISHED.items():
        pairs = zip(runs[name], runs["default"], strict=True)
        ordered = zip(runs[name], runs["best order"], strict=True)
        rows.append(
            [
                name,
                theirs,
                *(
                    spread([one["examples_per_second"] / two["examples_per_second"] for one, two in each])
                    for each in (pairs, ordered)
                ),
            ]
        )
    return rows


def main() -> None:
    """Run what is missing and write the table."""
    results = Results(HERE)
    wanted = sys.argv[1:] or sorted({cluster for cluster, _ in SECONDS})
    text = (
        f"Median [smallest, largest] of {SEEDS} seeds. Times sooner: the default's time / the time to its final loss.\n"
    )
    for (cluster, workload), seconds in SECONDS.items():
        keys = [f"{cluster}, {workload}, {n}, seed {s}" for n, s in itertools.product(STRATEGIES, range(SEEDS))]
        if cluster not in wanted and any(key not in results.entries for key in keys):
            continue
        runs = run_all(results, cluster, workload, STRATEGIES, seeds=SEEDS, seconds=seconds)
        text += f"\n## {workload} on {cluster}, {seconds:g} s\n\n"
        header = [
            "strategy",
            "examples/s",
            f"loss at {seconds:g} s",
            "loss at the default's samples",
            "s to the default's final loss",
            "times sooner",
            "kB sent per sample",
        ]
        seeds = EXACT_SEEDS.get((cluster, workload), SEEDS)
        exact = run_all(results, cluster, workload, {n: STRATEGIES[n] for n in EXACT}, seeds=seeds, seconds=seconds)
        text += table(header, rows_of(runs, seconds)) + lost(exact)
        if (cluster, workload) == ("two-racks", "bytes-lm/small"):
            text += "\nExamples/s, as published for another cluster and workload, and here:\n\n"
            text += table(["strategy", "published", "of the default", "of the best order"], published(runs))
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
