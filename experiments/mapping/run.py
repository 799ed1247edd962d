"""One workload on two racks of four nodes: as scheduled, in topology order, and with hierarchical exchanges.

    python -m experiments.mapping.run        (as root)

The lab `two-racks` lists its nodes alternately from both racks, as schedulers do. The strategies take turns, seed by
seed; each trains for the same time from the same start.
"""

import statistics
from pathlib import Path
from typing import Any

from experiments.resumable import Results, loss_at, spread, table
from paceline.runtime.api import RuntimeAPI, run_to_result
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

HERE = Path(__file__).parent
LAB = "lab:two-racks"
WORKLOAD = "bytes-lm/small"
SECONDS = 40.0
POINTS = (10.0, 20.0, 40.0)
"""Seconds of training at which held-out losses are compared."""
SEEDS = 3
STRATEGIES: dict[str, list[str]] = {
    "as scheduled (default)": [],
    "mapping.order=topology": ["mapping.order=topology"],
    "sync.mode=hierarchical": ["sync.mode=hierarchical"],
    "sync.mode=hierarchical, sync.bucket_mb=1": ["sync.mode=hierarchical", "sync.bucket_mb=1"],
}


def train(runtime: RuntimeAPI, settings: list[str], seed: int) -> dict[str, Any]:
    """Train for the time; seconds per step, and the held-out curve against seconds."""
    space = runtime.describe_knobs()
    result = run_to_result(
        runtime,
        TrialSpec(
            workload=WORKLOAD,
            strategy=space.strategy(space.parse(settings)),
            budget=Budget(seconds=SECONDS),
            seed=seed,
            evaluations=8,
        ),
    )
    assert result.failure is None, result.message
    return {
        "step_seconds": result.step_seconds.total,
        "examples_per_second": result.examples_per_second,
        "curve": [(point.seconds, point.loss) for point in result.heldout_curve],
        "wire_bytes_per_step": {tier: count / result.steps for tier, count in result.wire_bytes.items()},
        "link_utilisation": result.link_utilisation,
    }


def main() -> None:
    """Train what is missing and write the table."""
    results = Results(HERE)
    names = [(name, seed) for seed in range(SEEDS) for name in STRATEGIES]
    if any(f"{name}, seed {seed}" not in results.entries for name, seed in names):
        with EmbeddedRuntime(LAB) as runtime:
            for name, seed in names:
                results.get(f"{name}, seed {seed}", lambda: train(runtime, STRATEGIES[name], seed))  # noqa: B023
    rows = []
    for name in STRATEGIES:
        runs = [results.entries[f"{name}, seed {seed}"] for seed in range(SEEDS)]
        use = [run["link_utilisation"]["rack"] for run in runs]
        rows.append(
            [
                name,
                spread([run["step_seconds"] for run in runs]),
                spread([run["examples_per_second"] for run in runs]),
                *(spread([loss_at(run["curve"], seconds) for run in runs]) for seconds in POINTS),
                f"{statistics.median(use):.2f}",
            ]
        )
    text = f"{WORKLOAD} on {LAB}, {SECONDS:g} s each; median [smallest, largest] of {SEEDS} seeds.\n\n"
    header = [
        "strategy",
        "s per step",
        "examples/s",
        *(f"held-out loss at {point:g} s" for point in POINTS),
        "uplink use",
    ]
    text += table(header, rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
