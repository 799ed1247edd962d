"""A tuning session for its readers: the JSON object of `tune --json`, and tables."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from scipy import stats

from paceline.env.gain import log_gain
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.tuner.report import as_json
from paceline.tuner.tune import Confirmation, Gain, LiveTrial, TuningResult

MARKS = 4
"""Points in time at which two held-out losses are compared."""


def session_as_json(session: TuningResult) -> dict[str, Any]:
    """The object that `paceline tune --json` prints.

    What `paceline run --json` says, about the newest run of the recommended strategy, and what the session adds.
    """
    confirmation = session.confirmation
    gain = session.gain
    return {
        **as_json(session.recommended_run.result, mlflow_run_id=session.mlflow_run_id),
        "recommended": dict(session.recommended),
        "gain": gain.ratio,
        "gain_interval": gain.interval,
        "reference": _trial_as_json(session.reference),
        "trials": [_trial_as_json(trial) for trial in session.trials],
        "confirmation": confirmation and _confirmation_as_json(confirmation),
    }


def _trial_as_json(trial: LiveTrial) -> dict[str, Any]:
    return as_json(trial.result, mlflow_run_id=trial.mlflow_run_id)


def _confirmation_as_json(confirmation: Confirmation) -> dict[str, Any]:
    gain = confirmation.gain
    return {
        "strategy": dict(confirmation.strategy),
        "gain": gain and gain.ratio,
        "gain_interval": gain and gain.interval,
        "pairs": [[_trial_as_json(trial) for trial in pair] for pair in confirmation.pairs],
    }


def trials_as_table(session: TuningResult, default: Strategy) -> Table:
    """The reference trial and those that followed, one per row."""
    table = Table("", "what it changes", "examples/s", "goodput", "gain", "loss", title="Trials")
    for number, trial in enumerate((session.reference, *session.trials)):
        result = trial.result
        changes = result.strategy.describe(default).replace(" ", "\n")
        gain = log_gain(result, session.reference.result)
        if gain is None:
            table.add_row(str(number), changes, "-", "-", result.failure or "invalid", "-")
            continue
        loss = "-" if result.heldout_loss is None else f"{result.heldout_loss:.3f}"
        rates = f"{result.examples_per_second:.0f}", f"{result.goodput:.0f}"
        table.add_row(str(number), changes, *rates, f"{math.exp(gain):.2f}x", loss)
    return table


def pairs_as_table(confirmation: Confirmation, *, column: str) -> Table:
    """The default strategy and the candidate side by side, each with the means over its runs."""
    sides = [[pair[index].result for pair in confirmation.pairs] for index in (0, 1)]
    runs = len(confirmation.pairs)
    table = Table("", "default", column, title=f"Confirmation: means of {runs} runs each, in alternation")
    rows = {
        "throughput (examples/s)": [_interval([result.examples_per_second for result in side]) for side in sides],
        "goodput (examples/s)": [_interval([result.goodput for result in side]) for side in sides],
        "goodput / the default's": ["1", describe_gain(confirmation.gain)],
        **{
            f"held-out loss after {seconds:.1f} s": [_loss_at(side, seconds) for side in sides]
            for seconds in _marks([*sides[0], *sides[1]])
        },
        "bytes sent per step": [_sent_per_step(side) for side in sides],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def verdict(session: TuningResult, default: Strategy) -> str:
    """What to run from now on."""
    confirmation = session.confirmation
    if session.reference.result.failure is not None:
        return "recommended: default; nothing was tried, as the reference trial failed"
    if confirmation is None:
        return "recommended: default; no trial had more goodput"
    changes, gain = confirmation.strategy.describe(default), describe_gain(confirmation.gain)
    if not session.is_confirmed:
        return f"recommended: default; not confirmed to be better: {changes}, goodput {gain}"
    settings = " ".join(f"--set {setting}" for setting in changes.split())
    command = f"paceline run {session.reference.result.workload} {settings}"
    return f"recommended: {changes}; goodput {gain} that of the default\nrun it: {command}"


def print_session(session: TuningResult, default: Strategy, console: Console) -> None:
    """Both tables, as far as there is something in them, and the verdict."""
    console.print(trials_as_table(session, default))
    confirmation = session.confirmation
    if confirmation is not None and confirmation.gain is not None:
        console.print(pairs_as_table(confirmation, column="recommended" if session.is_confirmed else "candidate"))
    console.print(verdict(session, default), soft_wrap=True, highlight=False)


def describe_gain(gain: Gain | None) -> str:
    """The ratio and its interval."""
    if gain is None:
        return "unknown, as a run failed"
    low, high = gain.interval
    return f"{gain.ratio:.2f}x [{low:.2f}, {high:.2f}]"


def _interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval of Student's t over the runs."""
    if len(values) < 2:
        return f"{values[0]:.0f}"
    middle = statistics.fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{middle:.0f} [{middle - half:.0f}, {middle + half:.0f}]"


def _marks(results: Sequence[TrialResult]) -> list[float]:
    """Points in time, evenly spaced, that all of the trials reached, s."""
    end = min(result.heldout_curve[-1].seconds if result.heldout_curve else 0.0 for result in results)
    return [end * (number + 1) / MARKS for number in range(MARKS)] if end > 0 else []


def _loss_at(results: Sequence[TrialResult], seconds: float) -> str:
    """Mean over the trials of the held-out loss at that time, interpolated between evaluations."""
    losses = [
        np.interp(
            [seconds],
            [point.seconds for point in result.heldout_curve],
            [point.loss for point in result.heldout_curve],
        )
        for result in results
    ]
    return f"{np.mean(losses):.3f}"


def _sent_per_step(results: Sequence[TrialResult]) -> str:
    steps = sum(result.steps for result in results)
    sent = sum(sum(result.wire_bytes.values()) for result in results)
    return decimal(sent // steps) if steps else "-"
