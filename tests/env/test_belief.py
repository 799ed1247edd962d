"""Trials move the belief towards the truth."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.env.backends import SimulatorBackend
from paceline.env.belief import DRAWS, Belief
from paceline.env.observation import TuningCase
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import knob_space

ClusterOf = Callable[..., Cluster]

SESSIONS = 60
TRIALS = 4


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rho, ties in the order of appearance."""
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (first, second)]
    return float(np.corrcoef(ranks)[0, 1])


def session(seed: int) -> tuple[SimulatorBackend, TuningCase, list[TrialResult]]:
    """A simulated session: backend, case, and the trials of the default and of random candidates."""
    rng = np.random.default_rng(seed)
    backend = SimulatorBackend(knob_space(), trials=TRIALS)
    case = backend.begin(rng)
    tried = [0, *rng.choice(np.arange(1, len(case.candidates)), TRIALS, replace=False)]
    return backend, case, [backend.run(case, case.candidates[index], rng) for index in tried]


def test_ranking_approaches_the_truth() -> None:
    correlations: dict[int, list[float]] = {0: [], TRIALS: []}
    for seed in range(SESSIONS):
        backend, case, trials = session(seed)
        truth = backend.true_log_goodput(case, case.candidates)
        open_candidates = np.isfinite(truth) & ~np.isin(
            np.arange(len(case.candidates)), [case.candidates.index(trial.strategy) for trial in trials]
        )
        for known, found in correlations.items():
            mean = case.belief.predict(case.candidates, trials[: 1 + known]).mean
            found.append(rank_correlation(mean[open_candidates], truth[open_candidates]))
    prior, posterior = (float(np.mean(found)) for found in correlations.values())
    assert prior > 0.5
    assert posterior > prior + 0.02


def test_error_shrinks_and_certainty_grows() -> None:
    errors, spreads = [], []
    for seed in range(SESSIONS):
        backend, case, trials = session(seed)
        truth = backend.true_log_goodput(case, case.candidates)
        ran = np.isfinite(truth)
        forecasts = [case.belief.predict(case.candidates, trials[: 1 + known]) for known in (0, TRIALS)]
        gain = (truth - truth[0])[ran]
        errors.append([np.abs(forecast.mean[ran] - gain).mean() for forecast in forecasts])
        spreads.append([forecast.std[ran].mean() for forecast in forecasts])
    assert np.mean(errors, axis=0)[1] < 0.75 * np.mean(errors, axis=0)[0]
    assert np.mean(spreads, axis=0)[1] < 0.7 * np.mean(spreads, axis=0)[0]


def test_weights_are_a_distribution_and_the_reference_says_nothing() -> None:
    _, case, trials = session(5)
    weights = case.belief.weights(trials)
    assert weights.shape == (DRAWS,)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= 0).all()
    for prior in (case.belief.weights([]), case.belief.weights(trials[:1])):
        assert prior == pytest.approx(np.full(DRAWS, 1 / DRAWS), rel=1e-9)


def test_equal_questions_get_equal_answers_in_any_order() -> None:
    _, case, trials = session(7)
    fresh = Belief(case.workload, case.cluster, case.space.default)
    backwards = fresh.predict(case.candidates[::-1], trials)
    forecast = case.belief.predict(case.candidates, trials)
    np.testing.assert_array_equal(backwards.mean[::-1], forecast.mean)
    np.testing.assert_array_equal(backwards.std[::-1], forecast.std)
    assert 0.0 <= forecast.communication_share <= 1.0
    assert forecast.mean[0] == 0.0
    assert forecast.std[0] == 0.0


def test_a_divergence_is_evidence_and_a_lost_worker_is_not(
    space: KnobSpace, workload: WorkloadProfile, cluster_of: ClusterOf
) -> None:
    extreme = {
        "compress.codec": "topk",
        "compress.error_feedback": False,
        "sync.mode": "local_sgd",
        "sync.period": 64,
    }
    tried, untried = (space.strategy({**extreme, "compress.ratio": ratio}) for ratio in (0.001, 0.002))
    belief = Belief(workload, cluster_of("a", "b"), space.default)
    _, _, (reference, *_) = session(0)
    reference = dataclasses.replace(reference, strategy=space.default)

    def probability(*trials: TrialResult) -> float:
        return float(belief.predict([untried], [reference, *trials]).failure_probability[0])

    failed = dataclasses.replace(reference, strategy=tried, goodput=0.0, failure="diverged")
    ran = dataclasses.replace(reference, strategy=tried)
    lost = dataclasses.replace(failed, failure="worker_lost")
    assert probability(ran) < probability() < probability(failed)
    assert probability(lost) == probability()
