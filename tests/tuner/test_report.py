"""What a trial's readers get: JSON names, figures that are not finite, the table."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import HeldOutPoint, StepSplit, TrialResult
from paceline.tuner.report import as_json, as_table

PUBLISHED = {
    *("workload", "cluster", "strategy", "steps", "samples", "seconds", "examples_per_second"),
    *("goodput", "goodput_interval", "goodput_basis", "heldout_loss", "heldout_curve", "step_seconds"),
    *("wire_bytes", "link_utilisation", "load_balance_error", "staleness", "skipped_steps"),
    *("start_seconds", "snapshot", "failure", "mlflow_run_id"),
}


@pytest.fixture
def result() -> TrialResult:
    return TrialResult(
        workload="digits-cnn",
        cluster="local:4",
        strategy=Strategy.of({"sync.mode": "local_sgd", "sync.period": 8}),
        world_size=4,
        generations=1,
        steps=200,
        samples=12800,
        seconds=4.0,
        examples_per_second=3200.0,
        examples_per_second_interval=(3100.0, 3300.0),
        goodput=3000.0,
        goodput_interval=(2800.0, 3200.0),
        goodput_basis="estimate",
        heldout_curve=(
            HeldOutPoint(seconds=0.0, samples=0, loss=2.3),
            HeldOutPoint(seconds=4.0, samples=12800, loss=0.5),
        ),
        step_seconds=StepSplit(compute=0.015, communication_exposed=0.005),
        wire_bytes={"device": 1_000_000},
        start_seconds=0.3,
    )


def test_json_has_the_published_names(result: TrialResult) -> None:
    found = as_json(result, mlflow_run_id="abc")
    assert set(found) == PUBLISHED
    assert found["strategy"] == {"sync.mode": "local_sgd", "sync.period": 8}
    assert found["heldout_loss"] == 0.5
    assert found["heldout_curve"] == [[0.0, 0, 2.3], [4.0, 12800, 0.5]]
    assert set(found["step_seconds"]) == {field.name for field in dataclasses.fields(StepSplit)}
    assert (found["snapshot"], found["failure"], found["mlflow_run_id"]) == (None, None, "abc")


def test_json_has_no_number_that_is_not_finite(result: TrialResult) -> None:
    diverged = dataclasses.replace(
        result,
        goodput=math.nan,
        goodput_interval=(-math.inf, math.inf),
        heldout_curve=(HeldOutPoint(seconds=1.0, samples=64, loss=math.inf),),
        failure="diverged",
    )
    found = json.loads(json.dumps(as_json(diverged, mlflow_run_id=None), allow_nan=False))
    assert found["goodput"] is None
    assert found["goodput_interval"] == [None, None]
    assert found["heldout_curve"] == [[1.0, 64, None]]


def test_table_sets_results_side_by_side(result: TrialResult) -> None:
    failed = dataclasses.replace(result, heldout_curve=(), failure="diverged")
    output = io.StringIO()
    Console(width=100, file=output).print(as_table({"default": result, "recommended": failed}))
    text = output.getvalue()
    assert [line for line in text.splitlines() if "held-out loss" in line and "0.5000" in line and " - " in line]
    assert [line for line in text.splitlines() if "failure" in line and "diverged" in line]
    assert "3000.0 [2800.0, 3200.0]" in text
