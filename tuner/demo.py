"""The demo: what the commands do, once and one after the other, on this machine."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from paceline.env.backends import TRIALS
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.errors import InvalidRequest, WorkerFailure
from paceline.runtime.lab import file
from paceline.runtime.lab.built import BuiltLab
from paceline.tuner.cli.options import CHAMPION, DEFAULT_CLUSTER
from paceline.tuner.cli.stores import open_policy, register
from paceline.tuner.cli.target import find_runtime
from paceline.tuner.cli.train import watch_training
from paceline.tuner.cli.tune import served_advisor, watch_titled
from paceline.tuner.policy.client import PolicyClient
from paceline.tuner.policy.service import serving
from paceline.tuner.report import curve_as_table
from paceline.tuner.tracking.store import TrackingStore
from paceline.tuner.train import TrainConfig
from paceline.tuner.tune import TuneConfig, TuningResult, tune
from paceline.tuner.tuning_report import print_session

LAB = "two-racks"
"""Cluster of the demo where it can be built: a place in which mapping and compression matter."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much the demo does. The defaults end within a few minutes on two cores, busy ones too."""

    cluster: str = DEFAULT_CLUSTER
    """Where the embedded runtime's workers run."""
    workload: str = "bytes-lm/tiny"
    """What is tuned."""
    training: TrainConfig = field(default_factory=lambda: TrainConfig(timesteps=10_000))
    """How the policy is trained."""
    start_steps: int = 50
    """Steps of the default strategy before the snapshot that every trial starts from, at least 1."""
    trial_seconds: float = 6.0
    """Training time of each trial, s, positive."""
    trials: int = TRIALS
    """Trials that the policy chooses, at least 1."""
    confirm: int = 6
    """Pairs of runs in the confirmation, at least 2."""


def choose_cluster() -> tuple[str, str]:
    """The lab of two racks where it can be built, else local workers; and why, in a few words."""
    lab = file.load(LAB)
    try:
        built = BuiltLab(lab)
        built.build()
    except InvalidRequest as refused:
        return DEFAULT_CLUSTER, str(refused)
    built.destroy()
    return f"lab:{LAB}", f"{len(lab.nodes)} network namespaces in {len(lab.racks)} racks, with slow uplinks"


def demo(config: DemoConfig, tracking: TrackingStore, console: Console) -> TuningResult:
    """Train, register and serve a policy; tune a job with it; set the default and the recommended side by side.

    Raises what the commands raise.
    """
    budget = Budget(seconds=config.trial_seconds)
    target = find_runtime(None, config.cluster)
    default = target.strategy(config.workload)

    console.rule("1. A policy learns in the simulator")
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "policy"
        policy = watch_training(config.training, trained)
        model, _ = register(policy, trained, tracking)
    console.print(curve_as_table(policy.manifest.learning_curve))
    console.print(f"registered in MLflow as {model}, now {CHAMPION}", soft_wrap=True)

    console.rule(f"2. The policy, asked over gRPC, tunes {config.workload} on {config.cluster}")
    with (
        serving(open_policy(model, tracking.uri)) as address,
        PolicyClient(address) as client,
        target.open() as runtime,
    ):
        advisor = served_advisor(client, target.space)
        session = tune(
            runtime,
            target.profile(config.workload),
            TuneConfig(
                budget=budget,
                trials=config.trials,
                confirm=config.confirm,
                start_snapshot=_snapshot(runtime, config, default),
            ),
            advisor=advisor,
            watch=watch_titled,
            tracking=tracking,
        )

    console.rule("3. What it found; every run began at one snapshot")
    print_session(session, default, console)
    return session


def _snapshot(runtime: RuntimeAPI, config: DemoConfig, default: Strategy) -> str:
    """Train a little, as the very first steps of a job say little about the rest; the id of the state reached."""
    steps = config.start_steps
    spec = TrialSpec(workload=config.workload, strategy=default, budget=Budget(steps=steps), snapshot_every=steps)
    result = watch_titled(f"the first {steps} steps", runtime, spec, lambda event: None)
    if result.failure is not None:
        raise WorkerFailure(f"the first {steps} steps failed ({result.failure}): {result.message}")
    return result.snapshot
