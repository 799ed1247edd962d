"""Tuning sessions on a real runtime: what is tried, confirmed, recommended and recorded."""

import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from rich.console import Console
from scipy import stats

from paceline.runtime import workloads
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.events import TrialEvent, TrialFailed, TrialFinished, TrialStarted
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, StepSplit, TrialResult, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.decide import Recommendation
from paceline.tuner.report import as_json
from paceline.tuner.tracking.session import FAILURE
from paceline.tuner.tracking.store import TrackingStore, open_store
from paceline.tuner.tune import ROLE, Advisor, Confirmation, LiveTrial, TuneConfig, TuningResult, tune
from paceline.tuner.tuning_report import print_session, session_as_json, verdict

SPACE = knob_space()
DEFAULT = SPACE.default
LOCAL = SPACE.strategy({"sync.mode": "local_sgd"})
SPARSE = SPACE.strategy({"compress.codec": "topk", "compress.ratio": 0.001, "compress.error_feedback": False})
"""Loses nearly all of the gradient, so it learns far slower than the default whatever the machine does."""
WORKLOAD = workloads.create("digits-cnn").profile("digits-cnn")
CONFIG = TuneConfig(budget=Budget(steps=4), trials=2, confirm=2)


@pytest.fixture(scope="module")
def runtime() -> Iterator[RuntimeAPI]:
    with EmbeddedRuntime("local:2") as runtime:
        yield runtime


@pytest.fixture
def tracking(tmp_path: Path) -> TrackingStore:
    return open_store(f"sqlite:///{tmp_path / 'paceline.db'}")


def proposing(*strategies: Strategy) -> Advisor:
    """Proposes the strategies one after the other, then the default, which means: nothing more to try."""

    def ask(*, trials: Sequence[TrialResult], **question: Any) -> Recommendation:
        strategy = [*strategies, DEFAULT][len(trials) - 1]
        return Recommendation(strategy=strategy, expected_gain=1.0, uncertainty=0.0, policy_digest="")

    return Advisor(name="script", ask=ask)


class Watch:
    """Runs trials for real and notes them. Cancels those whose title has `cancel` in it, and then `stops` if told to.

    With `goodput`, that replaces what was measured, so that no test depends on the machine's speed; the runs of a
    strategy differ by one per cent. With `lucky`, only trials of the policy's choice seem to have that goodput.
    """

    def __init__(
        self,
        goodput: dict[Strategy, float] | None = None,
        *,
        lucky: float | None = None,
        cancel: str | None = None,
        stop: BaseException | None = None,
    ) -> None:
        self.ran: list[TrialSpec] = []
        self._goodput = goodput
        self._lucky = lucky
        self._cancel = cancel
        self._stop = stop

    def __call__(
        self, title: str, runtime: RuntimeAPI, spec: TrialSpec, log_event: Callable[[TrialEvent], None]
    ) -> TrialResult:
        self.ran.append(spec)
        for event in runtime.run_trial(spec):
            if isinstance(event, TrialFinished | TrialFailed):
                ended = dataclasses.replace(event, result=self._adjusted(title, event.result))
                log_event(ended)
                return ended.result
            log_event(event)
            if isinstance(event, TrialStarted) and self._cancel and self._cancel in title:
                if self._stop:
                    raise self._stop
                runtime.cancel_trial(event.trial_id)
        raise AssertionError("the stream ended without a result")

    def _adjusted(self, title: str, result: TrialResult) -> TrialResult:
        if self._goodput is not None:
            return dataclasses.replace(result, goodput=self._goodput[result.strategy] * 1.01 ** len(self.ran))
        if self._lucky is not None and title.startswith("trial"):
            return dataclasses.replace(result, goodput=self._lucky)
        return result


def run_tags(tracking: TrackingStore, session: TuningResult, *names: str) -> list[tuple[str | None, ...]]:
    """The tags of the session's child runs, oldest first."""
    assert session.mlflow_run_id is not None
    parent = tracking.client.get_run(session.mlflow_run_id)
    runs = tracking.client.search_runs([parent.info.experiment_id], order_by=["attributes.start_time"])
    children = [run for run in runs if run.data.tags.get(MLFLOW_PARENT_RUN_ID) == session.mlflow_run_id]
    return [tuple(run.data.tags.get(name) for name in names) for run in children]


def test_tries_what_the_policy_says_then_confirms_in_alternating_pairs(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0, SPARSE: 90.0})
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(SPARSE, LOCAL), watch=watch)
    assert [spec.strategy for spec in watch.ran] == [DEFAULT, SPARSE, LOCAL, DEFAULT, LOCAL, LOCAL, DEFAULT]
    assert len({dataclasses.replace(spec, strategy=DEFAULT) for spec in watch.ran}) == 1
    assert session.recommended == LOCAL
    assert session.gain.ratio == pytest.approx(1.5)
    assert session.gain.interval[0] > 1
    first, second = verdict(session, DEFAULT).splitlines()
    assert first.startswith("recommended: sync.mode=local_sgd; goodput 1.50x [")
    assert second == "run it: paceline run digits-cnn --set sync.mode=local_sgd"


def test_a_lucky_trial_is_not_believed(runtime: RuntimeAPI) -> None:
    """The candidate seems a million times as good in its trial; what the confirmation measures is real."""
    config = dataclasses.replace(CONFIG, budget=Budget(steps=30))
    session = tune(runtime, WORKLOAD, config, advisor=proposing(SPARSE), watch=Watch(lucky=1e9))
    assert session.confirmation is not None
    assert session.confirmation.strategy == SPARSE
    assert session.recommended == DEFAULT
    assert (session.gain.ratio, session.gain.interval) == (1.0, (1.0, 1.0))
    assert verdict(session, DEFAULT).startswith("recommended: default; not confirmed to be better: compress.")


def test_nothing_is_confirmed_when_no_trial_is_better(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 50.0})
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL), watch=watch)
    assert [spec.strategy for spec in watch.ran] == [DEFAULT, LOCAL]
    assert (session.confirmation, session.recommended) == (None, DEFAULT)
    assert verdict(session, DEFAULT) == "recommended: default; no trial had more goodput"


def test_a_failed_trial_is_a_labelled_result(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0, SPARSE: 200.0}, cancel="trial 2 of 2")
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL, SPARSE), watch=watch)
    assert [trial.result.failure for trial in session.trials] == [None, "cancelled"]
    assert session.recommended == LOCAL


def test_a_candidate_that_fails_while_it_is_confirmed_is_not_recommended(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0}, cancel="confirmation 1 of 2: sync")
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL), watch=watch)
    assert [spec.strategy for spec in watch.ran] == [DEFAULT, LOCAL, DEFAULT, LOCAL]
    assert session.recommended == DEFAULT
    assert verdict(session, DEFAULT).endswith("sync.mode=local_sgd, goodput unknown, as a run failed")


def test_nothing_is_tried_when_the_reference_trial_fails(runtime: RuntimeAPI) -> None:
    watch = Watch(cancel="reference")
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL), watch=watch)
    assert len(watch.ran) == 1
    assert (session.trials, session.recommended) == ((), DEFAULT)
    assert session_as_json(session)["failure"] == "cancelled"
    assert verdict(session, DEFAULT).startswith("recommended: default; nothing was tried")


def test_a_session_is_a_parent_run_and_each_trial_a_child(runtime: RuntimeAPI, tracking: TrackingStore) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0, SPARSE: 200.0}, cancel="trial 2 of 2")
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL, SPARSE), watch=watch, tracking=tracking)
    assert session.confirmation is not None
    trials = [session.reference, *session.trials, *(trial for pair in session.confirmation.pairs for trial in pair)]
    assert sorted(run_tags(tracking, session, ROLE, FAILURE), key=str) == sorted(
        [("reference", None), ("trial", None), ("trial", "cancelled"), *[("confirm", None)] * 4], key=str
    )
    for trial in trials:
        assert trial.mlflow_run_id is not None
        run = tracking.client.get_run(trial.mlflow_run_id)
        assert run.data.tags[ROLE] == trial.role
        assert run.info.status == ("KILLED" if trial.result.failure else "FINISHED")
        assert run.data.params["sync.mode"] == trial.result.strategy["sync.mode"]
    parent = tracking.client.get_run(str(session.mlflow_run_id))
    assert (parent.info.status, parent.data.params["policy"]) == ("FINISHED", "script")
    assert parent.data.metrics["gain"] == session.gain.ratio
    assert parent.data.tags["paceline.recommended"] == "sync.mode=local_sgd"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_runs_of_a_killed_session_end_killed(stop: BaseException, runtime: RuntimeAPI, tracking: TrackingStore) -> None:
    watch = Watch(cancel="trial 1 of 2", stop=stop)
    with pytest.raises(type(stop)):
        tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL), watch=watch, tracking=tracking)
    experiment = tracking.client.get_experiment_by_name(WORKLOAD.name)
    assert experiment is not None
    runs = tracking.client.search_runs([experiment.experiment_id])
    statuses = {run.data.tags.get(ROLE, "session"): run.info.status for run in runs}
    assert statuses == {"session": "KILLED", "reference": "FINISHED", "trial": "KILLED"}


def test_json_says_what_a_run_says_and_what_was_tried(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0})
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL), watch=watch)
    found = json.loads(json.dumps(session_as_json(session), allow_nan=False))
    added = {"recommended", "gain", "gain_interval", "reference", "trials", "confirmation"}
    assert set(found) == set(as_json(session.reference.result, mlflow_run_id=None)) | added
    assert found["recommended"] == found["strategy"] == dict(LOCAL)
    assert (found["gain"], found["gain_interval"]) == (session.gain.ratio, list(session.gain.interval))
    assert found["reference"]["strategy"] == dict(DEFAULT)
    assert [trial["strategy"] for trial in found["trials"]] == [dict(LOCAL)]
    assert found["confirmation"]["strategy"] == dict(LOCAL)
    pairs = [[trial["strategy"] for trial in pair] for pair in found["confirmation"]["pairs"]]
    assert pairs == [[dict(DEFAULT), dict(LOCAL)]] * 2


def test_tables_set_default_and_recommended_side_by_side(runtime: RuntimeAPI) -> None:
    watch = Watch({DEFAULT: 100.0, LOCAL: 150.0, SPARSE: 200.0}, cancel="trial 2 of 2")
    session = tune(runtime, WORKLOAD, CONFIG, advisor=proposing(LOCAL, SPARSE), watch=watch)
    output = io.StringIO()
    print_session(session, DEFAULT, Console(width=100, file=output))
    text = output.getvalue()
    assert "compress.error_feedback=False" in text
    for label in ("cancelled", "throughput", "goodput (examples/s)", "held-out loss after", "bytes sent per step"):
        assert label in text
    assert "\nrecommended: sync.mode=local_sgd; goodput 1.50x [" in text


def live(goodput: float) -> LiveTrial:
    result = TrialResult(
        workload="digits-cnn",
        cluster="local:2",
        strategy=DEFAULT,
        world_size=2,
        generations=1,
        steps=4,
        samples=256,
        seconds=1.0,
        examples_per_second=goodput,
        examples_per_second_interval=(goodput, goodput),
        goodput=goodput,
        goodput_interval=(goodput, goodput),
        goodput_basis="reference",
        heldout_curve=(),
        step_seconds=StepSplit(),
    )
    return LiveTrial(role="confirm", result=result, mlflow_run_id=None)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), min_size=2, max_size=6, unique=True))
def test_interval_is_that_of_the_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    confirmation = Confirmation(strategy=LOCAL, pairs=tuple((live(default), live(found)) for default, found in pairs))
    gain = confirmation.gain
    assert gain is not None
    logs = [[math.log(pair[index]) for pair in pairs] for index in (1, 0)]
    expected = stats.ttest_rel(*logs).confidence_interval(0.95)
    low, high = (math.log(bound) for bound in gain.interval)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"confirm": 1}, "confirm=1 must be at least 2"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_wrong_configs_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        dataclasses.replace(CONFIG, **change)
