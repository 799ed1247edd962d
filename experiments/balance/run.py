"""Devices of speeds 1 : 1 : 0.5 : 0.25, with even and with proportional batch shares; and a device that slows down.

    python -m experiments.balance.run        (as root)

The ideal step does the total work at the total speed: the ranks' compute times, each weighted by its device's speed.
What a step takes beyond it is imbalance and communication. In the second part a device is halved at a third of the
trial and restored at two thirds.
"""

import statistics
from pathlib import Path
from typing import Any

from experiments.resumable import Results, spread, table
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.events import StepDone, TrialFinished, TrialStarted
from paceline.runtime.domain.trial import Budget, TimedChange, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.lab import file
from paceline.runtime.server.balance import BalanceConfig

HERE = Path(__file__).parent
LAB = "mixed-devices"
WORKLOAD = "bytes-lm-large-batch/small"
WARMUP = 20
"""Steps, more than the window after which shares from the probe are put right."""
STEPS = 50
ROUNDS = 2
OVERLAP = ["sync.bucket_mb=1"]
SHARES = ("even", "proportional")
DRIFT_SECONDS = 90.0


def speeds() -> list[float]:
    """Configured speed of each device, cores."""
    return list(file.load(LAB).speeds.values())


def train(runtime: RuntimeAPI, share: str) -> dict[str, Any]:
    """Load-balance error, seconds per step, and the ideal."""
    space = runtime.describe_knobs()
    spec = TrialSpec(
        workload=WORKLOAD,
        strategy=space.strategy(space.parse([f"mapping.batch_share={share}", *OVERLAP])),
        budget=Budget(steps=STEPS),
        warmup_steps=WARMUP,
        evaluations=1,
    )
    steps = []
    for event in runtime.run_trial(spec):
        if isinstance(event, StepDone):
            steps.append(event)
        elif isinstance(event, TrialFinished):
            result = event.result
    compute = [
        statistics.fmean(times) for times in zip(*(step.compute_seconds for step in steps[WARMUP:]), strict=True)
    ]
    return {
        "load_balance_error": result.load_balance_error,
        "step_seconds": statistics.fmean(step.seconds for step in steps[WARMUP:]),
        "ideal_seconds": sum(c * v for c, v in zip(compute, speeds(), strict=True)) / sum(speeds()),
        "shares": [stop - start for start, stop in steps[-1].samples],
        "heldout_loss": result.heldout_loss,
    }


def drift(runtime: RuntimeAPI) -> list[dict[str, Any]]:
    """Every generation of a trial in which device 0 is halved for a while: when, and the shares from then on."""
    space = runtime.describe_knobs()
    name = runtime.describe_cluster().devices[0].name
    spec = TrialSpec(
        workload=WORKLOAD,
        strategy=space.strategy(space.parse(["mapping.batch_share=proportional", *OVERLAP])),
        budget=Budget(seconds=DRIFT_SECONDS),
        evaluations=1,
        timeline=(
            TimedChange(change=f"{name}.speed={speeds()[0] / 2:g}", seconds=DRIFT_SECONDS / 3),
            TimedChange(change=f"{name}.speed={speeds()[0]:g}", seconds=DRIFT_SECONDS * 2 / 3),
        ),
    )
    generations: list[dict[str, Any]] = []
    seconds, position = 0.0, 0
    for event in runtime.run_trial(spec):
        if isinstance(event, TrialStarted):
            generations.append({"seconds": seconds, "standstill": event.standstill_seconds})
        elif isinstance(event, StepDone):
            assert event.samples[0][0] == position, "samples must follow each other without a gap"
            position = event.samples[-1][1]
            seconds += event.seconds
            generations[-1]["shares"] = [stop - start for start, stop in event.samples]
            generations[-1]["step_seconds"] = event.seconds
    return generations


def main() -> None:
    """Measure what is missing and write the table."""
    results = Results(HERE)
    keys = [f"{share}, round {turn}" for turn in range(ROUNDS) for share in SHARES] + ["drift"]
    if any(key not in results.entries for key in keys):
        classes = ("experiments.balance.workload:LargeBatch",)
        with EmbeddedRuntime(f"lab:{LAB}", workload_classes=classes) as runtime:
            for turn in range(ROUNDS):
                for share in SHARES:
                    results.get(f"{share}, round {turn}", lambda: train(runtime, share))  # noqa: B023
            results.get("drift", lambda: drift(runtime))
    rows = []
    for share in SHARES:
        runs = [results.entries[f"{share}, round {turn}"] for turn in range(ROUNDS)]
        rows.append(
            [
                share,
                ", ".join(map(str, runs[-1]["shares"])),
                spread([run["load_balance_error"] for run in runs]),
                spread([run["step_seconds"] for run in runs]),
                spread([run["ideal_seconds"] for run in runs]),
                spread([run["step_seconds"] / run["ideal_seconds"] for run in runs]),
            ]
        )
    text = f"{WORKLOAD} on lab:{LAB}, sync.bucket_mb=1; median [smallest, largest] of {ROUNDS} rounds.\n\n"
    text += table(["batch share", "samples", "load-balance error", "s per step", "ideal s", "ratio"], rows)
    text += (
        f"\nOne trial of {DRIFT_SECONDS:g} s in which device 0 runs at half its speed from {DRIFT_SECONDS / 3:g} s to "
        f"{DRIFT_SECONDS * 2 / 3:g} s; shares are planned anew within {BalanceConfig().window_seconds:g} s, but not "
        f"within less than {BalanceConfig().window_steps} steps.\n\n"
    )
    text += table(
        ["generation at, s", "samples", "last step, s", "standstill, s"],
        [
            [
                f"{each['seconds']:.1f}",
                ", ".join(map(str, each["shares"])),
                f"{each['step_seconds']:.2f}",
                f"{each['standstill']:.3f}",
            ]
            for each in results.entries["drift"]
        ],
    )
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
