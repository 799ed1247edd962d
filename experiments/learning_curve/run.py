"""Learning curves of MaskablePPO on held-out simulator sessions, against random, default and the planner.

python -m experiments.learning_curve.run

Reads config.toml, computes what results.json does not hold yet, and writes table.md. May be stopped and started again.
"""

import dataclasses
import math
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from experiments.resumable import Results, table
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.decide import PlannerPolicy
from paceline.tuner.policy.evaluate import Sessions, run_sessions
from paceline.tuner.train import HELDOUT_SEED, Progress, TrainConfig, train

HERE = Path(__file__).parent
FINAL_SEED = HELDOUT_SEED + 10**8
"""First seed of the final comparison, whose sessions neither training nor learning curve has seen."""

Run = dict[str, Any]


def train_and_compare(name: str, config: TrainConfig, sessions: int) -> Run:
    """The learning curve of one training, and its final policy against the planner, session by session."""

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
            seeds=range(FINAL_SEED, FINAL_SEED + sessions),
        )
        for each in (policy, PlannerPolicy())
    )
    paired = Sessions(log_gain=learned.log_gain - planned.log_gain, regret=learned.regret - planned.regret)
    return {
        "config": dataclasses.asdict(config),
        "digest": policy.digest,
        "curve": dataclasses.asdict(policy.manifest.learning_curve),
        "final": {
            "policy": dataclasses.asdict(learned.score),
            "planner": dataclasses.asdict(planned.score),
            "difference": dataclasses.asdict(paired.score),
        },
    }


def over_seeds(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval over training seeds, by Student's t."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return f"{np.mean(values):.4f} ± {student_t.ppf(0.975, len(values) - 1) * error:.4f}"


def goodput(scores: Sequence[dict[str, float]]) -> str:
    """Geometric mean of the goodput relative to the default's."""
    return f"{math.exp(np.mean([score['log_gain'] for score in scores])):.3f}x"


def regrets(scores: Sequence[dict[str, float]]) -> list[float]:
    """By training seed."""
    return [score["regret"] for score in scores]


def curves(runs: dict[str, list[Run]]) -> str:
    """Regret after some training, one column of regret and one of goodput per variant."""
    header = ["trials learned from"]
    for variant in runs:
        header += [f"{variant}: regret", "goodput"]
    columns = {variant: [run["curve"]["points"] for run in of_variant] for variant, of_variant in runs.items()}
    rows = []
    for points in zip(*(zip(*column, strict=True) for column in columns.values()), strict=True):
        cells = [str(points[0][0]["timesteps"])]
        for of_seeds in points:
            scores = [point["score"] for point in of_seeds]
            cells += [over_seeds(regrets(scores)), goodput(scores)]
        rows.append(cells)
    return table(header, rows)


def baselines(runs: Sequence[Run]) -> str:
    """The policies that do not learn, on the same sessions; only random trials depend on the seed."""
    rows = []
    for name in runs[0]["curve"]["baselines"]:
        scores = [run["curve"]["baselines"][name] for run in runs]
        rows.append([name, over_seeds(regrets(scores)), goodput(scores)])
    return table(["does not learn", "regret", "goodput"], rows)


def against_planner(runs: dict[str, list[Run]]) -> str:
    """The final policies, paired with the planner by session."""
    rows = []
    for variant, of_variant in runs.items():
        for run in of_variant:
            final = run["final"]
            paired = final["difference"]
            rows.append(
                [
                    variant,
                    str(run["config"]["seed"]),
                    f"{final['policy']['regret']:.4f}",
                    f"{final['planner']['regret']:.4f}",
                    f"{paired['regret']:+.4f} ± {paired['regret_halfwidth']:.4f}",
                ]
            )
    return table(["PPO", "seed", "regret", "planner's regret", "difference"], rows)


def main() -> None:
    """Train what is missing and write the table."""
    study = tomllib.loads((HERE / "config.toml").read_text())
    results = Results(HERE)
    runs: dict[str, list[Run]] = {variant: [] for variant in study["variants"]}
    for seed in study["seeds"]:
        for variant, settings in study["variants"].items():
            config = TrainConfig(**study["train"], **settings, seed=seed)
            name = f"{variant}, seed {seed}"

            def compute(name: str = name, config: TrainConfig = config) -> Run:
                return train_and_compare(name, config, study["final_sessions"])

            runs[variant].append(results.get(name, compute))
    # The baselines do not depend on the variant.
    of_one_variant = next(iter(runs.values()))
    facts = of_one_variant[0]["config"]
    text = (
        f"The same {facts['heldout_sessions']} held-out sessions each time: {facts['trials']} trials on "
        f"{facts['candidates']} candidates. Regret 0 is the best candidate; goodput is relative to the default. "
        f'Mean ± half of the 95 % interval over {len(study["seeds"])} training seeds. "With the belief", logits begin '
        "at the belief's acquisition, which is what the planner goes by; without, at zero.\n\n"
        f"{curves(runs)}\n{baselines(of_one_variant)}\n"
        f"The final policies on {study['final_sessions']} other held-out sessions. The difference to the planner is "
        "paired by session; negative is better than the planner; ± half of the 95 % interval over sessions.\n\n"
        f"{against_planner(runs)}"
    )
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
