"""Devices of speeds 1 : 1 : 0.5 : 0.25: waiting for the slowest, sharing the batch by speed, and not waiting at all.

    python -m experiments.asynchronous.run        (as root)

On the lab `mixed-devices` each strategy trains for the same time from the same start.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.contest import loss_at, run_all
from experiments.resumable import Results, spread, table

HERE = Path(__file__).parent
CLUSTER, WORKLOAD = "mixed-devices", "bytes-lm/small"
SECONDS, SEEDS = 25.0, 3
STRATEGIES = {
    "synchronous, even shares (default)": [],
    "synchronous, shares by speed": ["mapping.batch_share=proportional"],
    "async, staleness 1": ["sync.mode=async", "sync.staleness=1"],
    "async, staleness 4": ["sync.mode=async"],
    "async, staleness 4, damped": ["sync.mode=async", "sync.damped=true"],
    "async, staleness 4, fp16": ["sync.mode=async", "compress.codec=fp16"],
}


def main() -> None:
    """Train what is missing, write the table and draw the loss curves."""
    runs = run_all(Results(HERE), CLUSTER, WORKLOAD, STRATEGIES, seeds=SEEDS, seconds=SECONDS)
    default = runs["synchronous, even shares (default)"]
    rows = []
    for name, mine in runs.items():
        ratios = [
            one["examples_per_second"] / two["examples_per_second"] for one, two in zip(mine, default, strict=True)
        ]
        equal = [two["curve"][-1][1] for two in default]
        rows.append(
            [
                name,
                spread([run["examples_per_second"] for run in mine]),
                spread(ratios),
                spread([run.get("staleness", 0.0) for run in mine]),
                spread([loss_at(run, seconds=SECONDS) for run in mine]),
                spread([loss_at(run, samples=samples) for run, samples in zip(mine, equal, strict=True)]),
            ]
        )
        seconds, _, losses = zip(*mine[0]["curve"], strict=True)
        plt.plot(seconds, losses, marker=".", label=name)
    plt.xlabel("seconds")
    plt.ylabel("held-out loss")
    plt.legend(fontsize="small")
    plt.savefig(HERE / "loss.png", dpi=120)
    text = f"{WORKLOAD} on {CLUSTER}, {SECONDS:g} s each; median [smallest, largest] of {SEEDS} seeds.\n\n"
    header = [
        "strategy",
        "examples/s",
        "of the default's",
        "updates missed",
        f"loss at {SECONDS:g} s",
        "loss at the default's samples",
    ]
    text += table(header, rows) + "\n![Held-out loss against seconds, seed 0](loss.png)\n"
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
