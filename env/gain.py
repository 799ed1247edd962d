"""The goodput gain of a trial over the session's reference trial."""

import math
from collections.abc import Sequence

from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult


def is_valid(result: TrialResult) -> bool:
    """Whether the trial ended without a failure label and measured a positive, finite goodput."""
    return result.failure is None and math.isfinite(result.goodput) and result.goodput > 0


def log_gain(result: TrialResult, reference: TrialResult) -> float | None:
    """log(goodput / the reference's goodput), natural; None where either of the two is not a valid result."""
    if not (is_valid(result) and is_valid(reference)):
        return None
    return math.log(result.goodput) - math.log(reference.goodput)


def best_trial(trials: Sequence[TrialResult]) -> tuple[Strategy, float]:
    """Strategy and log gain of the best valid trial; the first trial is the reference and wins ties.

    The gain is at least 0, that of the reference itself. Needs at least one trial.
    """
    best, best_gain = trials[0].strategy, 0.0
    for trial in trials:
        gain = log_gain(trial, trials[0])
        if gain is not None and gain > best_gain:
            best, best_gain = trial.strategy, gain
    return best, best_gain
