"""Sessions and trials as MLflow shows them: parents, params, metrics, labels, and how runs end."""

import json
import math
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.runtime.domain.events import TrialFailed, TrialFinished, TrialStarted
from paceline.runtime.errors import PacelineError
from paceline.tuner.tracking import run as run_module
from paceline.tuner.tracking.run import FLUSH_METRICS
from paceline.tuner.tracking.session import TrialRun
from paceline.tuner.tracking.store import TrackingStore, every
from tests.tuner.tracking.samples import (
    SNAPSHOT,
    SPEC,
    STRATEGY,
    evaluated,
    make_result,
    open_session,
    snapshot_taken,
    step_done,
)

Spawn = Callable[..., "subprocess.Popen[str]"]

NONSENSE = {
    "MLFLOW_TRACKING_URI": "http://127.0.0.1:9/nonsense",
    "MLFLOW_REGISTRY_URI": "file:/nonsense",
    "MLFLOW_RUN_ID": "nonsense",
    "MLFLOW_PARENT_RUN_ID": "nonsense",
    "MLFLOW_EXPERIMENT_ID": "999",
    "MLFLOW_EXPERIMENT_NAME": "nonsense",
    "MLFLOW_ACTIVE_MODEL_ID": "nonsense",
    "MLFLOW_RUN_CONTEXT": '{"mlflow.parentRunId": "nonsense"}',
    "MLFLOW_ENABLE_WORKSPACES": "true",
    "MLFLOW_WORKSPACE": "nonsense",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "true",
    "_MLFLOW_SERVER_ARTIFACT_ROOT": "/nonsense",
}

RUN_A_TRIAL = """
import sys
from tests.tuner.tracking.samples import SPEC, evaluated, make_result, open_session, step_done
from paceline.runtime.domain.events import TrialFinished
from paceline.tuner.tracking.session import TrialRun
from paceline.tuner.tracking.store import open_store
tracking = open_store(sys.argv[1])
trial = TrialRun(tracking, sys.argv[2], SPEC, name="elsewhere")
for event in (step_done(1, loss=5.0), evaluated(1, loss=4.0), TrialFinished(result=make_result())):
    trial.log_event(event)
print(trial.run_id)
"""


def read(tracking: TrackingStore, run_id: str) -> Any:
    return tracking.client.get_run(run_id)


def history(tracking: TrackingStore, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in tracking.client.get_metric_history(run_id, name)]


def artifact(tracking: TrackingStore, run_id: str, path: str) -> Any:
    with open(tracking.client.download_artifacts(run_id, path)) as file:
        return json.load(file)


def test_a_session_is_a_run_in_the_experiment_of_its_workload(tracking: TrackingStore) -> None:
    with open_session(tracking, params={"trials": 6}) as session:
        session.log({"best_goodput": 2.0}, step=1)
    run = read(tracking, session.run_id)
    assert tracking.client.get_experiment(run.info.experiment_id).name == "bytes-lm/tiny"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "policy")
    expected = {"kind": "session", "workload": "bytes-lm/tiny", "cluster": "local:1", "knob_version": "abc123"}
    assert {f"paceline.{name}": value for name, value in expected.items()}.items() <= run.data.tags.items()
    assert "mlflow.parentRunId" not in run.data.tags
    assert run.data.params == {"trials": "6"}
    assert history(tracking, session.run_id, "best_goodput") == [(1, 2.0)]
    assert artifact(tracking, session.run_id, "cluster.json")["devices"][0]["profile"]["flops"] == 1e10
    assert artifact(tracking, session.run_id, "workload.json")["global_batch"] == 32


def test_a_trial_shows_its_knobs_steps_snapshot_and_result(tracking: TrackingStore) -> None:
    result = make_result()
    with open_session(tracking) as session:
        trial = session.start_trial(SPEC, name="local_sgd")
        trial.log_event(
            TrialStarted(
                trial_id="trial-1", generation=1, step=0, strategy=STRATEGY, devices=(0,), standstill_seconds=0.1
            )
        )
        trial.log_event(step_done(1, loss=5.0))
        trial.log_event(step_done(2, loss=4.0, noise_scale=64.0))
        trial.log_event(evaluated(2, loss=4.5))
        trial.log_event(snapshot_taken())
        trial.log_event(TrialFinished(result=result))
    run = read(tracking, trial.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "sync.mode": "local_sgd",
        "sync.period": "8",
        "compress.error_feedback": "true",
        "budget.steps": "200",
        "seed": "7",
        "world_size": "0",
        "warmup_steps": "5",
        "evaluations": "5",
        "snapshot_every": "0",
        "on_worker_lost": "replace",
        "timeline": "()",
    }
    tags = {"paceline.kind": "trial", "mlflow.parentRunId": session.run_id, "paceline.workload": "bytes-lm/tiny",
            "paceline.cluster": "local:1", "paceline.knob_version": "abc123"}  # fmt: skip
    assert tags.items() <= run.data.tags.items()
    assert "paceline.failure" not in run.data.tags
    assert history(tracking, trial.run_id, "train/loss") == [(1, 5.0), (2, 4.0)]
    assert history(tracking, trial.run_id, "step/compute") == [(1, 0.015), (2, 0.015)]
    assert history(tracking, trial.run_id, "step/wire_bytes/node") == [(1, 1024.0), (2, 2048.0)]
    assert history(tracking, trial.run_id, "step/noise_scale") == [(2, 64.0)]
    assert history(tracking, trial.run_id, "heldout/loss") == [(2, 4.5)]
    assert history(tracking, trial.run_id, "heldout/samples") == [(2, 64.0)]
    final = {"examples_per_second": 1600.0, "goodput": 1200.0, "goodput_low": 1100.0, "goodput_high": 1300.0,
             "load_balance_error": 0.125, "wire_bytes/node": 4096.0, "step_seconds/compute": 0.015,
             "heldout_loss": 2.5}  # fmt: skip
    assert final.items() <= run.data.metrics.items()
    assert artifact(tracking, trial.run_id, "snapshots/snap-1.json")["parts"][0]["digest"] == (SNAPSHOT.parts[0].digest)
    assert artifact(tracking, trial.run_id, "generations/1.json")["devices"] == [0]
    assert artifact(tracking, trial.run_id, "result.json")["strategy"] == dict(STRATEGY)


@pytest.mark.parametrize(("label", "status"), [("diverged", "FAILED"), ("cancelled", "KILLED")])
def test_a_failed_trial_has_its_label_and_no_metric_of_the_result(
    tracking: TrackingStore, label: str, status: str
) -> None:
    failed = make_result(failure=label, message="because", examples_per_second=math.nan)
    with open_session(tracking) as session:
        trial = session.start_trial(SPEC, name="t")
        trial.log_event(step_done(1, loss=5.0))
        trial.log_event(step_done(2, loss=math.inf))
        trial.log_event(TrialFailed(result=failed))
    run = read(tracking, trial.run_id)
    assert run.info.status == status
    assert (run.data.tags["paceline.failure"], run.data.tags["paceline.message"]) == (label, "because")
    assert {name for name in run.data.metrics if not name.startswith(("step/", "train/"))} == set()
    assert history(tracking, trial.run_id, "train/loss") == [(1, 5.0)]
    written = artifact(tracking, trial.run_id, "result.json")
    assert (written["failure"], written["examples_per_second"]) == (label, None)
    assert read(tracking, session.run_id).info.status == "FINISHED"


def test_what_is_not_finite_or_took_no_time_is_no_metric(tracking: TrackingStore) -> None:
    with open_session(tracking) as session:
        infinite = session.start_trial(SPEC, name="infinite")
        infinite.finish(make_result(goodput=math.nan, goodput_interval=(-math.inf, math.inf)))
        timeless = session.start_trial(SPEC, name="timeless")
        timeless.finish(make_result(seconds=0.0))
    metrics = read(tracking, infinite.run_id).data.metrics
    assert "examples_per_second" in metrics
    assert not any(name.startswith("goodput") for name in metrics)
    assert read(tracking, timeless.run_id).data.metrics == {}


class Batches:
    """Counts the metrics of each call of `log_batch`, and passes it on."""

    def __init__(self, tracking: TrackingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.now = 0.0
        log_batch = tracking.client.log_batch

        def counted(run_id: str, metrics: Any = (), params: Any = ()) -> None:
            if metrics:
                self.sizes.append(len(metrics))
            log_batch(run_id, metrics=metrics, params=params)

        monkeypatch.setattr(tracking.client, "log_batch", counted)
        monkeypatch.setattr(run_module, "monotonic", lambda: self.now)


def test_two_thousand_steps_are_few_batches(tracking: TrackingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(tracking, monkeypatch)
    with open_session(tracking) as session, session.start_trial(SPEC, name="t") as trial:
        for step in range(1, 2001):
            trial.log_event(step_done(step, loss=1.0 / step))
    assert all(size < FLUSH_METRICS + 20 for size in batches.sizes)
    assert len(batches.sizes) <= sum(batches.sizes) / FLUSH_METRICS + 1
    losses = history(tracking, trial.run_id, "train/loss")
    assert losses == [(step, 1.0 / step) for step in range(1, 2001)]


def test_metrics_wait_no_longer_than_a_second(tracking: TrackingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(tracking, monkeypatch)
    with open_session(tracking) as session:
        session.log({"a": 1.0})
        batches.now = 0.9
        session.log({"b": 2.0})
        assert batches.sizes == []
        batches.now = 1.1
        session.log({"c": 3.0})
        assert batches.sizes == [3]
        batches.now = 2.0
        session.log({"d": 4.0})
        assert batches.sizes == [3]
    assert batches.sizes == [3, 1]


def test_children_of_parallel_threads_keep_their_parents(tracking: TrackingStore) -> None:
    def work(index: int) -> tuple[str, list[str]]:
        with open_session(tracking, name=f"session {index}") as session, ThreadPoolExecutor(2) as pool:

            def trial(number: int) -> str:
                with session.start_trial(SPEC, name=f"trial {number}") as trial:
                    trial.log_event(step_done(1, loss=float(index)))
                    trial.finish(make_result(goodput=10.0 * index + number))
                return trial.run_id

            return session.run_id, list(pool.map(trial, range(2)))

    with ThreadPoolExecutor(2) as pool:
        families = list(pool.map(work, range(2)))
    for index, (session, trials) in enumerate(families):
        runs = [read(tracking, run_id) for run_id in trials]
        assert [run.data.tags["mlflow.parentRunId"] for run in runs] == [session] * 2
        assert [run.data.metrics["goodput"] for run in runs] == [10.0 * index, 10.0 * index + 1]
        assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_child_of_another_process_keeps_its_parent_whatever_the_environment_says(
    tracking: TrackingStore, spawn: Spawn
) -> None:
    with open_session(tracking) as session:
        process = spawn(RUN_A_TRIAL, tracking.uri, session.run_id, **NONSENSE)
        trial = process.communicate()[0].strip()
    assert process.returncode == 0
    run = read(tracking, trial)
    assert run.data.tags["mlflow.parentRunId"] == session.run_id
    assert run.info.experiment_id == tracking.experiment_id("bytes-lm/tiny")
    assert run.info.artifact_uri.startswith(tracking.artifact_root.as_uri())
    assert run.info.status == "FINISHED"
    assert run.data.metrics["goodput"] == 1200.0
    assert history(tracking, trial, "train/loss") == [(1, 5.0)]
    assert artifact(tracking, trial, "result.json")["mlflow_run_id"] == trial
    experiments = [experiment.name for experiment in every(tracking.client.search_experiments)]
    assert sorted(experiments) == ["Default", "bytes-lm/tiny"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, "FAILED"), (PacelineError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_an_exception_ends_all_runs_of_the_session(
    tracking: TrackingStore, error: type[BaseException], status: str
) -> None:
    session = open_session(tracking)
    done = session.start_trial(SPEC, name="done")
    done.finish(make_result())
    trials = [session.start_trial(SPEC, name="a"), session.start_trial(SPEC, name="b")]
    trials[0].log({"waiting": 1.0})
    with pytest.raises(error), session:
        raise error
    assert read(tracking, done.run_id).info.status == "FINISHED"
    ended = [read(tracking, run.run_id) for run in (*trials, session)]
    assert [run.info.status for run in ended] == [status] * 3
    assert all(run.info.end_time for run in ended)
    assert ended[0].data.metrics == {"waiting": 1.0}


def test_a_trial_left_without_a_result_is_killed(tracking: TrackingStore) -> None:
    with open_session(tracking) as session:
        session.start_trial(SPEC, name="t")
    runs = every(tracking.client.search_runs, experiment_ids=[session.experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {"t": "KILLED", "policy": "FINISHED"}


def test_runs_end_though_the_store_refuses_their_metrics(tracking: TrackingStore) -> None:
    session = open_session(tracking)
    trial = session.start_trial(SPEC, name="t")
    trial.log({"no\nname": 1.0})
    with pytest.raises(PacelineError, match="Invalid value") as caught, session:
        pass
    assert "\n" not in str(caught.value)
    assert read(tracking, trial.run_id).info.status == "KILLED"
    assert read(tracking, session.run_id).info.status == "FINISHED"


def test_a_run_whose_params_are_refused_is_failed(tracking: TrackingStore) -> None:
    with pytest.raises(PacelineError, match="Invalid value"):
        open_session(tracking, params={"no\nname": 1})
    (run,) = every(tracking.client.search_runs, experiment_ids=[tracking.experiment_id("bytes-lm/tiny")])
    assert run.info.status == "FAILED"


def test_a_trial_of_an_unknown_session_is_refused(tracking: TrackingStore) -> None:
    with pytest.raises(PacelineError, match="nonsense"):
        TrialRun(tracking, "nonsense", SPEC, name="t")
