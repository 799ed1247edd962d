"""Results for their readers: a trial as the JSON object of `--json`, trials and learning curves as tables."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table

from paceline.runtime.domain.trial import TrialResult

if TYPE_CHECKING:
    from paceline.tuner.policy.evaluate import LearningCurve


def as_json(result: TrialResult, *, mlflow_run_id: str | None) -> dict[str, Any]:
    """The object that `paceline run --json` prints. A figure that is not finite becomes null."""
    finite: dict[str, Any] = _finite(
        {
            "workload": result.workload,
            "cluster": result.cluster,
            "strategy": dict(result.strategy),
            "steps": result.steps,
            "samples": result.samples,
            "seconds": result.seconds,
            "examples_per_second": result.examples_per_second,
            "goodput": result.goodput,
            "goodput_interval": result.goodput_interval,
            "goodput_basis": result.goodput_basis,
            "heldout_loss": result.heldout_loss,
            "heldout_curve": [[point.seconds, point.samples, point.loss] for point in result.heldout_curve],
            "step_seconds": dataclasses.asdict(result.step_seconds),
            "wire_bytes": result.wire_bytes,
            "link_utilisation": result.link_utilisation,
            "load_balance_error": result.load_balance_error,
            "staleness": result.staleness,
            "skipped_steps": result.skipped_steps,
            "start_seconds": result.start_seconds,
            "snapshot": result.snapshot or None,
            "failure": result.failure,
            "mlflow_run_id": mlflow_run_id,
        }
    )
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_table(results: Mapping[str, TrialResult]) -> Table:
    """Results side by side, each in a column under its title."""
    table = Table()
    table.add_column()
    for title in results:
        table.add_column(title, justify="right", overflow="fold")
    rows = [_rows(result) for result in results.values()]
    for label in dict.fromkeys(label for row in rows for label in row):
        table.add_row(label, *(row.get(label, "-") for row in rows))
    return table


def _rows(result: TrialResult) -> dict[str, str]:
    low, high = result.goodput_interval
    split = result.step_seconds
    rows = {
        "throughput (examples/s)": f"{result.examples_per_second:.1f}",
        f"goodput, {result.goodput_basis} (examples/s)": f"{result.goodput:.1f} [{low:.1f}, {high:.1f}]",
        "steps": str(result.steps),
        "training time (s)": f"{result.seconds:.1f}",
    }
    if result.heldout_loss is not None:
        rows["held-out loss"] = f"{result.heldout_loss:.4f}"
    if split.total > 0:
        rows["step: compute (ms)"] = f"{1000 * split.compute:.1f}"
        rows["step: communication, exposed + hidden (ms)"] = (
            f"{1000 * split.communication_exposed:.1f} + {1000 * split.communication_hidden:.1f}"
        )
    rows |= {f"sent, {tier}": decimal(sent) for tier, sent in result.wire_bytes.items()}
    if result.failure is not None:
        rows["failure"] = result.failure
    return rows


def curve_as_table(curve: "LearningCurve") -> Table:
    """A learning curve and the baselines on the same held-out sessions, as gains over the default strategy."""
    table = Table("policy", "simulated trials", "held-out gain", "regret")
    rows = [(name, "-", score) for name, score in curve.baselines.items()]
    rows += [("learned", str(point.timesteps), point.score) for point in curve.points]
    for name, timesteps, score in rows:
        middle, half = score.log_gain, score.log_gain_halfwidth
        gain, low, high = (math.exp(value) for value in (middle, middle - half, middle + half))
        regret = f"{score.regret:.3f} +- {score.regret_halfwidth:.3f}"
        table.add_row(name, timesteps, f"{gain:.3f}x [{low:.3f}, {high:.3f}]", regret)
    return table
