"""`paceline train`: learn a policy on the simulator."""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.runtime.errors import InvalidRequest
from paceline.tuner.cli.options import CHAMPION, Json, NoTracking, TrackingUri

if TYPE_CHECKING:
    from paceline.tuner.policy.store import StoredPolicy
    from paceline.tuner.train import Progress, TrainConfig


def train(
    *,
    timesteps: Annotated[int, typer.Option("--timesteps", help="Simulated trials to learn from.")] = 30_000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights, cases and exploration.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Store the policy here too; must not exist yet.")
    ] = None,
    json_output: Json = False,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
) -> None:
    """Train a policy on the simulator and register it in MLflow as the champion."""
    from rich.console import Console

    from paceline.tuner.cli.stores import open_tracking, register
    from paceline.tuner.policy.store import check_target
    from paceline.tuner.report import curve_as_table
    from paceline.tuner.train import TrainConfig

    if out is None and no_tracking:
        raise InvalidRequest("--no-tracking without --out would keep the policy nowhere; add --out DIR")
    config = TrainConfig(timesteps=timesteps, seed=seed)
    if out is not None:
        check_target(out)
    tracking = None if no_tracking else open_tracking(tracking_uri)
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary) / "policy"
        policy = watch_training(config, folder)
        model, run_id = register(policy, folder, tracking) if tracking else (None, None)
    curve = policy.manifest.learning_curve
    if json_output:
        found = {
            "policy_digest": policy.digest,
            "knob_version": policy.manifest.knob_version,
            "out": str(out) if out else None,
            "model": model,
            "mlflow_run_id": run_id,
            "learning_curve": dataclasses.asdict(curve),
        }
        print(json.dumps(found, allow_nan=False))
    else:
        Console().print(curve_as_table(curve))
    if model:
        print(f"registered as {model}, now {CHAMPION}; `paceline serve` serves it", file=sys.stderr)


def watch_training(config: "TrainConfig", out: Path) -> "StoredPolicy":
    """Train a policy into the folder `out`, with the progress and the newest held-out gain on stderr."""
    from paceline.tuner import train
    from paceline.tuner.cli.progress import progress_bar

    with progress_bar("training") as bar:
        task = bar.add_task("measuring the baselines", total=config.total)

        def show(state: "Progress") -> None:
            gain = math.exp(state.curve.points[-1].score.log_gain)
            description = f"{state.timesteps} trials, held-out gain {gain:.3f}x"
            bar.update(task, completed=state.timesteps, description=description)

        return train.train(config, out, show)
