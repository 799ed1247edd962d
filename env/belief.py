"""What trials so far say about strategies not yet tried: the simulator as a prior, reweighted by evidence.

A fixed ensemble of draws of the simulator's unknowns is weighted by the likelihood of the trial results: importance
sampling of the Bayesian posterior, the update step of a particle filter (Gordon et al., IEE Proceedings F 140, 1993).
Nothing is drawn when asking, so equal questions get equal answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from paceline.env.forms import Floats
from paceline.env.gain import log_gain
from paceline.env.schedule import Bools
from paceline.env.simulator import Unknowns, simulate
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile

DRAWS = 64
"""Size of the ensemble."""
SIGMA = 0.2
"""Standard deviation of measured minus predicted log gain under the right draw: noise, and the error of a model that
is wide enough not to trust a single draw."""
SURPRISE = 0.1
"""Likelihood of a failure that the draw does not predict, or of a success where it predicts failure."""
PREDICTED_FAILURES = ("oom", "diverged")
"""Failure labels that the simulator can predict; others say nothing about the strategy."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The belief about S strategies; arrays have shape [S]."""

    mean: Floats
    """Expected log goodput gain over the default."""
    std: Floats
    """Its standard deviation over the weighted ensemble."""
    failure_probability: Floats
    """Probability that a trial fails."""
    communication_share: float
    """Expected part of the default strategy's step in which ranks wait for exchanges and each other, in [0, 1]."""


class Belief:
    """The weighted ensemble for one workload on one cluster. Every question brings its own trials.

    It keeps what it has simulated, so one instance is not for several threads at once.
    """

    def __init__(self, workload: WorkloadProfile, cluster: Cluster, default: Strategy) -> None:
        """Raises IllegalStrategy or InvalidRequest as `simulate` does."""
        self._workload = workload
        self._cluster = cluster
        prediction = simulate(workload, cluster, [default], _prior())
        self._default_goodput = prediction.goodput[0]
        self._communication_share = prediction.exposed_seconds[0] / prediction.step_seconds[0]
        # What was simulated before, one row per strategy.
        self._row: dict[Strategy, int] = {}
        self._gains: Floats = np.empty((0, DRAWS))
        self._failed: Bools = np.empty((0, DRAWS), dtype=np.bool_)

    def predict(self, strategies: Sequence[Strategy], trials: Sequence[TrialResult]) -> Forecast:
        """What to expect of the strategies, given the trials so far.

        The first trial is the reference trial; without any, this is the prior.
        """
        weights = self.weights(trials)
        rows = self._rows(strategies)
        gains = self._gains[rows]
        mean: Floats = gains @ weights
        return Forecast(
            mean=mean,
            std=np.sqrt(np.square(gains - mean[:, None]) @ weights),
            failure_probability=self._failed[rows] @ weights,
            communication_share=float(self._communication_share @ weights),
        )

    def weights(self, trials: Sequence[TrialResult]) -> Floats:
        """Probability of each draw given the trials so far, [DRAWS], summing to 1."""
        log_likelihood = np.zeros(DRAWS)
        rows = self._rows([trial.strategy for trial in trials])
        predicted = self._gains[rows]
        fails = self._failed[rows]
        for number, trial in enumerate(trials):
            measured = log_gain(trial, trials[0])
            if measured is not None:
                log_likelihood -= np.square((measured - predicted[number]) / SIGMA) / 2
                log_likelihood += np.where(fails[number], math.log(SURPRISE), 0.0)
            elif trial.failure in PREDICTED_FAILURES:
                log_likelihood += np.where(fails[number], 0.0, math.log(SURPRISE))
        likelihood = np.exp(log_likelihood - log_likelihood.max())
        weights: Floats = likelihood / likelihood.sum()
        return weights

    def _rows(self, strategies: Sequence[Strategy]) -> npt.NDArray[np.intp]:
        """Rows of the strategies; those not met before are simulated, all at once."""
        missing = dict.fromkeys(strategy for strategy in strategies if strategy not in self._row)
        if missing:
            prediction = simulate(self._workload, self._cluster, list(missing), _prior())
            gains = np.log(prediction.goodput / self._default_goodput)
            self._gains = np.concatenate([self._gains, gains])
            self._failed = np.concatenate([self._failed, prediction.failed])
            for strategy in missing:
                self._row[strategy] = len(self._row)
        return np.array([self._row[strategy] for strategy in strategies], dtype=np.intp)


@cache
def _prior() -> Unknowns:
    return Unknowns.sample(np.random.default_rng(0), DRAWS)
