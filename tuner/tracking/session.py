"""A tuning session in MLflow: one parent run, and one child run per trial."""

import dataclasses
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import (
    Evaluated,
    SnapshotTaken,
    StepDone,
    TrialEvent,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)
from paceline.runtime.domain.trial import TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.tuner.report import as_json
from paceline.tuner.tracking.run import TrackedRun
from paceline.tuner.tracking.store import TrackingStore

WORKLOAD = "paceline.workload"
CLUSTER = "paceline.cluster"
KNOB_VERSION = "paceline.knob_version"
FAILURE = "paceline.failure"
MESSAGE = "paceline.message"


class TrialRun(TrackedRun):
    """The child run of one trial, fed with the trial's events."""

    # A trial that was left without a result was not run to its end.
    status_without_error: ClassVar[str] = "KILLED"

    def __init__(self, tracking: TrackingStore, session_run_id: str, spec: TrialSpec, *, name: str) -> None:
        """Start a trial of a session by the id of its run; the session may live in another process."""
        with tracking.errors():
            session = tracking.client.get_run(session_run_id)
        super().__init__(
            tracking,
            experiment_id=session.info.experiment_id,
            kind="trial",
            name=name,
            tags={key: session.data.tags[key] for key in (WORKLOAD, CLUSTER, KNOB_VERSION)},
            params={**spec.strategy, **_settings(spec)},
            parent_run_id=session_run_id,
        )

    def log_event(self, event: TrialEvent) -> None:
        """Log one event of the trial's stream; the last one ends the run."""
        match event:
            case TrialStarted():
                placement = {"step": event.step, "devices": event.devices, "strategy": dict(event.strategy)}
                self.log_json(f"generations/{event.generation}.json", placement)
            case StepDone():
                self.log(_step_metrics(event), step=event.step)
            case Evaluated():
                point = dataclasses.asdict(event.point)
                self.log({f"heldout/{name}": value for name, value in point.items()}, step=event.step)
            case SnapshotTaken():
                manifest = dataclasses.asdict(event.snapshot)
                self.log_json(f"snapshots/{event.snapshot.snapshot_id}.json", manifest)
            case TrialFinished() | TrialFailed():
                self.finish(event.result)

    def finish(self, result: TrialResult) -> None:
        """Log the result and end the run. A failed trial's figures go into the artifact, never metrics."""
        self.log_json("result.json", as_json(result, mlflow_run_id=self.run_id))
        if result.failure is None:
            self.log(_result_metrics(result))
            self.end("FINISHED")
            return
        self.tag(FAILURE, result.failure)
        self.tag(MESSAGE, result.message)
        self.end("KILLED" if result.failure == "cancelled" else "FAILED")


class TuningSession(TrackedRun):
    """The parent run of a tuning session, in the experiment named after its workload.

    Leaving it ends the trials that are still open, then the session, all with the same status.
    """

    def __init__(
        self,
        tracking: TrackingStore,
        *,
        workload: WorkloadProfile,
        cluster: Cluster,
        knob_version: str,
        name: str,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._trials = ExitStack()
        with tracking.errors():
            experiment_id = tracking.experiment_id(workload.name)
        super().__init__(
            tracking,
            experiment_id=experiment_id,
            kind="session",
            name=name,
            tags={WORKLOAD: workload.name, CLUSTER: cluster.name, KNOB_VERSION: knob_version},
            params=params,
            documents={
                "workload.json": dataclasses.asdict(workload),
                "cluster.json": dataclasses.asdict(cluster),
            },
        )

    def start_trial(self, spec: TrialSpec, *, name: str) -> TrialRun:
        """Start the child run of a trial; from any thread."""
        return self._trials.enter_context(TrialRun(self.tracking, self.run_id, spec, name=name))

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._trials.__exit__(error_type, error, traceback)
        finally:
            super().__exit__(error_type, error, traceback)


def _settings(spec: TrialSpec) -> dict[str, Any]:
    """What besides the strategy defines a trial, with the budget's fields as `budget.steps` and so on."""
    values = dataclasses.asdict(spec)
    budget = {f"budget.{name}": value for name, value in values.pop("budget").items()}
    del values["workload"], values["strategy"]
    return {name: value for name, value in {**values, **budget}.items() if value not in (None, "")}


def _step_metrics(step: StepDone) -> dict[str, float]:
    return {
        "train/loss": step.loss,
        "step/seconds": step.seconds,
        **{f"step/{part}": seconds for part, seconds in dataclasses.asdict(step.split).items()},
        **{f"step/wire_bytes/{tier}": sent for tier, sent in step.wire_bytes.items()},
        "step/load_balance_error": step.load_balance_error,
        **({} if step.noise_scale is None else {"step/noise_scale": step.noise_scale}),
        **({"step/staleness": statistics.fmean(step.staleness)} if any(step.staleness) else {}),
        **({"step/skipped": step.skipped} if step.skipped else {}),
        **({"step/loss_scale": step.loss_scale} if step.loss_scale != 1 else {}),
    }


def _result_metrics(result: TrialResult) -> dict[str, float]:
    """The figures under their names in `--json`; none where no time passed, as rates mean nothing then."""
    if not result.seconds > 0:
        return {}
    optional = {"heldout_loss": result.heldout_loss, "noise_scale": result.noise_scale}
    return {
        "steps": result.steps,
        "samples": result.samples,
        "seconds": result.seconds,
        "examples_per_second": result.examples_per_second,
        "examples_per_second_low": result.examples_per_second_interval[0],
        "examples_per_second_high": result.examples_per_second_interval[1],
        "goodput": result.goodput,
        "goodput_low": result.goodput_interval[0],
        "goodput_high": result.goodput_interval[1],
        **{f"step_seconds/{part}": mean for part, mean in dataclasses.asdict(result.step_seconds).items()},
        **{f"wire_bytes/{tier}": sent for tier, sent in result.wire_bytes.items()},
        **{f"link_utilisation/{tier}": use for tier, use in result.link_utilisation.items()},
        "load_balance_error": result.load_balance_error,
        "staleness": result.staleness,
        "skipped_steps": result.skipped_steps,
        "peak_memory_bytes": result.peak_memory_bytes,
        "start_seconds": result.start_seconds,
        **{name: value for name, value in optional.items() if value is not None},
    }
