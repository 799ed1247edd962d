"""`paceline run`: one trial."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.tuner.cli.options import EmbeddedCluster, Json, NoTracking, RuntimeAddress, TrackingUri, WorkloadName

if TYPE_CHECKING:
    from paceline.runtime.api import RuntimeAPI
    from paceline.runtime.domain.trial import TrialResult, TrialSpec
    from paceline.tuner.cli.target import Target
    from paceline.tuner.tracking.store import TrackingStore

DEFAULT_STEPS = 200
TRIAL_FAILED = 1


def run(
    workload: WorkloadName,
    *,
    runtime: RuntimeAddress = None,
    cluster: EmbeddedCluster = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="Set a knob; may be repeated. The rest keep defaults."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help=f"Optimizer steps; {DEFAULT_STEPS} if neither this nor --seconds is given."),
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Training time, s.")] = None,
    target_loss: Annotated[
        float | None, typer.Option("--target-loss", help="Stop early at this held-out loss.")
    ] = None,
    world_size: Annotated[int, typer.Option("--world-size", help="Ranks; 0: one per device.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of initial weights and sample order.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="STEP|SECONDSs:TARGET.SETTING=VALUE",
            help="Change the lab during the trial, e.g. 50:e0.speed=0.1 or 20s:west.uplink=50Mbit/s; may be repeated.",
        ),
    ] = None,
    json_output: Json = False,
    tracking_uri: TrackingUri = None,
    no_tracking: NoTracking = False,
) -> int:
    """Train WORKLOAD under one strategy and say what was measured. Exits with 1 when the trial failed."""
    from rich.console import Console

    from paceline.runtime.domain.trial import Budget, TrialSpec, parse_timed_change
    from paceline.tuner.cli.stores import open_tracking
    from paceline.tuner.cli.target import find_runtime
    from paceline.tuner.report import as_json, as_table

    if steps is None and seconds is None:
        steps = DEFAULT_STEPS
    budget = Budget(steps=steps, seconds=seconds, target_loss=target_loss)
    target = find_runtime(runtime, cluster)
    strategy = target.strategy(workload, settings or (), world_size=world_size)
    spec = TrialSpec(
        workload=workload,
        strategy=strategy,
        budget=budget,
        world_size=world_size,
        seed=seed,
        timeline=tuple(map(parse_timed_change, changes or ())),
    )
    target.check_changes([timed.change for timed in spec.timeline])
    tracking = None if no_tracking else open_tracking(tracking_uri)
    with target.open() as opened:
        result, run_id = _tracked(target, opened, spec, tracking)
    if json_output:
        print(json.dumps(as_json(result, mlflow_run_id=run_id), allow_nan=False))
    else:
        Console().print(as_table({workload: result}))
    if result.failure is None:
        return 0
    print(f"paceline run: the trial failed ({result.failure}): {result.message}", file=sys.stderr)
    return TRIAL_FAILED


def _tracked(
    target: "Target", runtime: "RuntimeAPI", spec: "TrialSpec", tracking: "TrackingStore | None"
) -> "tuple[TrialResult, str | None]":
    """Run the trial, recorded as a session of one trial; the result and the id of the trial's MLflow run."""
    from paceline.tuner.cli.progress import watch

    if tracking is None:
        return watch(runtime, spec), None
    from paceline.tuner.tracking.session import TuningSession

    with TuningSession(
        tracking,
        workload=target.profile(spec.workload),
        cluster=runtime.describe_cluster(),
        knob_version=target.space.version,
        name=f"run {spec.workload}",
    ) as session:
        trial = session.start_trial(spec, name=spec.strategy.describe(target.space.default))
        return watch(runtime, spec, trial.log_event), trial.run_id
