"""Decide what to try next and what to settle on: one interface for the learned policy and the baselines."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.env.backends import CANDIDATES
from paceline.env.candidates import propose
from paceline.env.gain import is_valid
from paceline.env.observation import TuningCase, encode, mask
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.tuner.policy.network import acquisition, rows_of


class Policy(Protocol):
    """Chooses the next candidate. Pure: equal arguments always give the same answer."""

    @property
    def name(self) -> str:
        """By which tables and `--tuners` call it."""

    @property
    def digest(self) -> str:
        """SHA-256 of the stored policy, hex; empty for a baseline, whose name says all."""

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        """Index of the candidate to try next. One that was tried before means: nothing more to try."""


@dataclass(frozen=True)
class DefaultPolicy:
    """Always the default strategy, which is what users run today."""

    name: str = "default"
    digest: str = ""

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        """0."""
        return 0


@dataclass(frozen=True)
class RandomPolicy:
    """Any candidate not yet tried, all equally likely."""

    seed: int
    """Seed of the draws. Sessions with other candidates get other draws from the same seed."""
    name: str = "random"
    digest: str = ""

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        """A draw that depends on nothing but the seed, the case and the trials' number."""
        allowed = np.flatnonzero(mask(case, trials, max_candidates=len(case.candidates)))
        session = zlib.crc32(repr((case.workload, case.cluster, case.candidates)).encode())
        rng = np.random.default_rng([self.seed, session, len(trials)])
        return int(rng.choice(allowed))


@dataclass(frozen=True)
class PlannerPolicy:
    """The candidate of highest acquisition under the belief: the learned policy without what it learned."""

    name: str = "planner"
    digest: str = ""

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        """The first of the highest."""
        return choose_highest(acquisition, case, trials)


def choose_highest(score: Callable[[Tensor], Tensor], case: TuningCase, trials: Sequence[TrialResult]) -> int:
    """Index of the allowed candidate with the highest score, the lowest index on a tie."""
    allowed = mask(case, trials, max_candidates=len(case.candidates))
    return int(np.argmax(np.where(allowed, candidate_scores(score, case, trials), -np.inf)))


def candidate_scores(
    score: Callable[[Tensor], Tensor], case: TuningCase, trials: Sequence[TrialResult]
) -> npt.NDArray[np.float32]:
    """Scores of all candidates, float32 [M]; `score` maps rows [M, F + C] (see `rows_of`) to [M]."""
    observation = encode(case, trials, max_candidates=len(case.candidates))
    candidates, context = (torch.from_numpy(observation[name]) for name in ("candidates", "context"))
    with torch.inference_mode():
        scores = score(rows_of(candidates, context, features=len(candidates) // len(case.candidates)))
    return np.asarray(scores, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to run next, or what to settle on."""

    strategy: Strategy
    """The strategy."""
    expected_gain: float
    """Goodput relative to the default strategy's, 1 = equal: measured when settling, else predicted."""
    uncertainty: float
    """Standard deviation of log(expected_gain)."""
    policy_digest: str
    """Digest of the policy that answered; empty for a baseline."""


def recommend(
    policy: Policy,
    *,
    space: KnobSpace,
    workload: WorkloadProfile,
    cluster: Cluster,
    trials: Sequence[TrialResult],
    remaining: int,
    seed: int,
    candidates: int = CANDIDATES,
) -> Recommendation:
    """The next strategy to try, or, with no trials remaining, the one to settle on. Pure.

    `trials` are those of the session so far, oldest first, the first being the reference trial. `remaining` counts the
    trial asked for. `seed` and `candidates` are those of `propose`, the same for the whole session.
    Raises InvalidRequest for trials that are not of this session, and what `propose` raises.
    """
    if remaining < 0:
        raise InvalidRequest(f"remaining={remaining} must not be negative")
    case = TuningCase(
        space=space,
        workload=workload,
        cluster=cluster,
        candidates=propose(space, workload, cluster, count=candidates, seed=seed),
        trials_budget=max(0, len(trials) - 1) + remaining,
    )
    _check_trials(case, trials)
    if remaining == 0:
        return settle(space.default, trials, policy_digest=policy.digest)
    strategy = case.candidates[policy.choose(case, trials)]
    forecast = case.belief.predict([strategy], trials)
    return Recommendation(
        strategy=strategy,
        expected_gain=math.exp(float(forecast.mean[0])),
        uncertainty=float(forecast.std[0]),
        policy_digest=policy.digest,
    )


def settle(default: Strategy, trials: Sequence[TrialResult], *, policy_digest: str = "") -> Recommendation:
    """The trial of highest goodput among those whose interval clears the reference trial's, else the default.

    `trials` as in `recommend`. So nothing is recommended that was not measured to be better.
    """
    better = [trial for trial in trials[1:] if trial.strategy != default and _clears(trial, trials[0])]
    if not better:
        return Recommendation(strategy=default, expected_gain=1.0, uncertainty=0.0, policy_digest=policy_digest)
    best = max(better, key=lambda trial: trial.goodput)
    return Recommendation(
        strategy=best.strategy,
        expected_gain=best.goodput / trials[0].goodput,
        uncertainty=math.hypot(_log_std(best), _log_std(trials[0])),
        policy_digest=policy_digest,
    )


def _clears(trial: TrialResult, reference: TrialResult) -> bool:
    valid = is_valid(trial) and is_valid(reference)
    return valid and trial.goodput_interval[0] > reference.goodput_interval[1]


def _log_std(trial: TrialResult) -> float:
    """Standard deviation of the log goodput, from the width of its 95 % interval to first order."""
    low, high = trial.goodput_interval
    return (high - low) / (2 * 1.96 * trial.goodput)


def _check_trials(case: TuningCase, trials: Sequence[TrialResult]) -> None:
    """Raise InvalidRequest unless every trial is one of this session's candidates, the first the default."""
    for number, trial in enumerate(trials):
        for what, found, wanted in (
            ("workload", trial.workload, case.workload.name),
            ("cluster", trial.cluster, case.cluster.name),
            ("world size", trial.world_size, case.cluster.size),
        ):
            if found != wanted:
                raise InvalidRequest(f"trial {number} has {what} {found}; this session's is {wanted}")
        if trial.strategy not in case.candidates:
            described = trial.strategy.describe(case.space.default)
            raise InvalidRequest(
                f"trial {number} ({described}) is none of the session's {len(case.candidates)} candidates; "
                "ask with the seed that the session began with"
            )
    if trials and trials[0].strategy != case.space.default:
        raise InvalidRequest("trial 0 must be the reference trial, which runs the default strategy")
