"""Learning curves of MaskablePPO on held-out simulator sessions, against random, default and the planner.

    python experiments/learning_curve/run.py

Reads config.toml beside it, runs what results.json does not hold yet, and writes results.json after each run and
table.md at the end. May be stopped and started again.
"""

import dataclasses
import json
import math
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.decide import PlannerPolicy
from paceline.tuner.policy.evaluate import run_sessions
from paceline.tuner.train import HELDOUT_SEED, Progress, TrainConfig, train

HERE = Path(__file__).parent
FINAL_SEED = HELDOUT_SEED + 10**8
"""First seed of the final comparison, whose sessions neither training nor learning curve has seen."""


def main() -> None:
    """Run what is missing, then write the table."""
    study = tomllib.loads((HERE / "config.toml").read_text())
    results_file = HERE / "results.json"
    results: dict[str, Any] = json.loads(results_file.read_text()) if results_file.exists() else {}
    for seed in study["seeds"]:
        for variant, settings in study["variants"].items():
            config = TrainConfig(**study["train"], **settings, seed=seed)
            key = f"{variant}, seed {seed}"
            if results.get(key, {}).get("setup") != setup(config, study["final_sessions"]):
                results[key] = run(key, config, study["final_sessions"])
                unfinished = results_file.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(results, indent=1) + "\n")
                unfinished.replace(results_file)
    wanted = {variant: [results[f"{variant}, seed {seed}"] for seed in study["seeds"]] for variant in study["variants"]}
    (HERE / "table.md").write_text(table(wanted, study))


def setup(config: TrainConfig, final_sessions: int) -> dict[str, Any]:
    """What decides the outcome of a run, as JSON has it."""
    facts = {**dataclasses.asdict(config), "final_sessions": final_sessions, "knobs": knob_space().version}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


def run(name: str, config: TrainConfig, final_sessions: int) -> dict[str, Any]:
    """Train once; the learning curve, and the final policy against the planner."""

    def show(state: Progress) -> None:
        print(f"\r{name}: {state.timesteps}/{state.total}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        policy = train(config, Path(folder) / "policy", show)
    print(file=sys.stderr)
    learned, planned = (
        run_sessions(
            each,
            space=knob_space(),
            candidates=config.candidates,
            trials=config.trials,
            seeds=range(FINAL_SEED, FINAL_SEED + final_sessions),
        )
        for each in (policy, PlannerPolicy())
    )
    difference = dataclasses.replace(learned, regret=learned.regret - planned.regret).score
    return {
        "setup": setup(config, final_sessions),
        "digest": policy.digest,
        "curve": dataclasses.asdict(policy.manifest.learning_curve),
        "final": {
            "policy": dataclasses.asdict(learned.score),
            "planner": dataclasses.asdict(planned.score),
            "regret_difference": difference.regret,
            "regret_difference_halfwidth": difference.regret_halfwidth,
        },
    }


def over_seeds(values: list[float]) -> str:
    """Mean and half of its 95 % interval over training seeds, by Student's t."""
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{np.mean(values):.4f} ± {student_t.ppf(0.975, len(values) - 1) * spread:.4f}"


def table(results: dict[str, list[dict[str, Any]]], study: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    variants = list(results)
    first = results[variants[0]][0]["curve"]
    facts, seeds = results[variants[0]][0]["setup"], len(study["seeds"])
    lines = [
        f"Regret on the same {facts['heldout_sessions']} held-out sessions of {facts['trials']} trials on "
        f"{facts['candidates']} candidates (0 = the best candidate); "
        f"mean ± 95 % interval over {seeds} training seeds. In brackets: goodput relative to the default.",
        "",
        f"| trials learned from | {' | '.join(f'PPO {variant}' for variant in variants)} |",
        f"|---:|{'---:|' * len(variants)}",
    ]
    for index, point in enumerate(first["points"]):
        cells = []
        for variant in variants:
            scores = [run["curve"]["points"][index]["score"] for run in results[variant]]
            gain = math.exp(float(np.mean([score["log_gain"] for score in scores])))
            cells.append(f"{over_seeds([score['regret'] for score in scores])} ({gain:.3f}x)")
        lines.append(f"| {point['timesteps']} | {' | '.join(cells)} |")
    lines += ["", "| policy that does not learn | regret | goodput |", "|---|---:|---:|"]
    for name in ("planner", "random", "default"):
        scores = [run["curve"]["baselines"][name] for runs in results.values() for run in runs]
        regret = float(np.mean([score["regret"] for score in scores]))
        gain = math.exp(float(np.mean([score["log_gain"] for score in scores])))
        lines.append(f"| {name} | {regret:.4f} | {gain:.3f}x |")
    lines += [
        "",
        f"Final policy against the planner on {study['final_sessions']} other sessions, paired by session "
        "(negative: less regret than the planner; ± 95 % interval over sessions).",
        "",
        "| PPO | seed | regret | planner's regret | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for variant, runs in results.items():
        for seed, each in zip(study["seeds"], runs, strict=True):
            final = each["final"]
            lines.append(
                f"| {variant} | {seed} | {final['policy']['regret']:.4f} | {final['planner']['regret']:.4f} | "
                f"{final['regret_difference']:+.4f} ± {final['regret_difference_halfwidth']:.4f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
