"""Train a policy on the simulator with MaskablePPO (Huang and Ontañón, arXiv:2006.14171; PPO: arXiv:1707.06347)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from paceline.env.backends import CANDIDATES, TRIALS, SimulatorBackend
from paceline.env.observation import CONTEXT_FEATURES, Observation, TuningCase, candidate_features
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.decide import (
    DefaultPolicy,
    PlannerPolicy,
    Policy,
    RandomPolicy,
    choose_highest,
)
from paceline.tuner.policy.evaluate import CurvePoint, LearningCurve, Score, run_sessions
from paceline.tuner.policy.network import CandidatePolicy, CandidateScorer
from paceline.tuner.policy.store import FORMAT, Manifest, StoredPolicy, check_target, save

HELDOUT_SEED = 10**9
"""First seed of the held-out sessions. Training seeds stay below it."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. The defaults take about a minute on one core."""

    timesteps: int = 30_000
    """Simulated trials to learn from, at least 1; rounded up to whole rollouts."""
    seed: int = 0
    """Seed of weights, cases and exploration, 0 to 1e9 - 1. Equal configs give equal policies on the same machine."""
    candidates: int = CANDIDATES
    """Candidates of a session, at least 2."""
    trials: int = TRIALS
    """Trials of a session, the reference trial not counted, at least 1."""
    environments: int = 16
    """Sessions simulated side by side, at least 1."""
    rollout_steps: int = 48
    """Trials per environment between two updates, at least 2."""
    epochs: int = 4
    """Passes over a rollout per update, at least 1."""
    batch_size: int = 384
    """Trials per gradient step, at least 2."""
    learning_rate: float = 1e-3
    """Step size of Adam, positive."""
    hidden: tuple[int, ...] = (64, 64)
    """Units of each hidden layer, at least one layer."""
    prior_scale: float = 20.0
    """Weight of the belief's acquisition in a logit, per nat of gain; 0: learn without the belief's advice."""
    evaluations: int = 5
    """Held-out evaluations during training, besides the one before it; at least 1."""
    heldout_sessions: int = 100
    """Sessions of a held-out evaluation, at least 2."""

    def __post_init__(self) -> None:
        lowest = {"seed": 0, "candidates": 2, "rollout_steps": 2, "batch_size": 2, "heldout_sessions": 2}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = lowest.get(field.name, 1)
            if field.type is int and value < low:
                raise InvalidRequest(f"training: {field.name}={value} must be at least {low}")
        if self.seed >= HELDOUT_SEED:
            raise InvalidRequest(f"training: seed={self.seed} must be below {HELDOUT_SEED}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidRequest(f"training: learning_rate={self.learning_rate} must be positive and finite")
        if not (math.isfinite(self.prior_scale) and self.prior_scale >= 0):
            raise InvalidRequest(f"training: prior_scale={self.prior_scale} must be finite and not negative")
        if not self.hidden or min(self.hidden) < 1:
            raise InvalidRequest(f"training: hidden={self.hidden} must name at least one unit per layer")

    @property
    def total(self) -> int:
        """`timesteps`, rounded up to whole rollouts."""
        rollout = self.environments * self.rollout_steps
        return math.ceil(self.timesteps / rollout) * rollout


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the training is; sent after every rollout and at its end."""

    timesteps: int
    """Trials so far."""
    total: int
    """Trials in the end."""
    curve: LearningCurve
    """Held-out points so far, and the baselines."""


def train(config: TrainConfig, out: Path, progress: Callable[[Progress], None] = lambda _: None) -> StoredPolicy:
    """Train on random clusters and workloads for this process's knob space, and store the policy in the folder `out`.

    Raises as `check_target` does, before anything starts.
    """
    check_target(out)
    space = knob_space()
    environments = DummyVecEnv([lambda: _environment(space, config)] * config.environments)
    with _one_thread():
        model = MaskablePPO(
            CandidatePolicy,
            environments,
            learning_rate=config.learning_rate,
            n_steps=config.rollout_steps,
            batch_size=config.batch_size,
            n_epochs=config.epochs,
            # Sessions are short and their return is what counts, early gains no more than late ones.
            gamma=1.0,
            seed=config.seed,
            device="cpu",
            policy_kwargs={"hidden": config.hidden, "prior_scale": config.prior_scale},
        )
        watch = _Watch(config, space, progress)
        model.learn(config.total, callback=watch)
    environments.close()
    manifest = Manifest(
        format=FORMAT,
        knob_version=space.version,
        candidate_features=candidate_features(space),
        context_features=CONTEXT_FEATURES,
        hidden=config.hidden,
        prior_scale=config.prior_scale,
        candidates=config.candidates,
        training=dataclasses.asdict(config),
        learning_curve=watch.curve,
    )
    return save(manifest, _scorer(model), out)


def _scorer(model: BaseAlgorithm) -> CandidateScorer:
    assert isinstance(model.policy, CandidatePolicy)
    return model.policy.action_net


class _Uninformed(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """Drops `info`, which DummyVecEnv would copy deeply at every step."""

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {}


def _environment(space: KnobSpace, config: TrainConfig) -> gymnasium.Env[Observation, np.int64]:
    backend = SimulatorBackend(space, candidates=config.candidates, trials=config.trials)
    return _Uninformed(gymnasium.make("paceline/Tuning-v0", backend=backend, disable_env_checker=True))


@contextmanager
def _one_thread() -> Iterator[None]:
    """The network is so small that handing its parts to threads costs more than computing them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _InTraining:
    """The policy as it is now, for evaluation."""

    scorer: CandidateScorer
    name: str = "policy"
    digest: str = ""

    def choose(self, case: TuningCase, trials: Sequence[TrialResult]) -> int:
        return choose_highest(self.scorer, case, trials)


class _Watch(BaseCallback):
    """Evaluates at even distances, and reports."""

    def __init__(self, config: TrainConfig, space: KnobSpace, progress: Callable[[Progress], None]) -> None:
        super().__init__()
        self._config = config
        self._space = space
        self._progress = progress
        self._baselines: dict[str, Score] = {}
        self._points: list[CurvePoint] = []

    @property
    def curve(self) -> LearningCurve:
        """The points so far."""
        return LearningCurve(baselines=self._baselines, points=tuple(self._points))

    def _on_training_start(self) -> None:
        for baseline in (PlannerPolicy(), RandomPolicy(self._config.seed), DefaultPolicy()):
            self._baselines[baseline.name] = self._score(baseline)

    def _on_rollout_start(self) -> None:
        # The update by the rollout before is done by now.
        if self.num_timesteps * self._config.evaluations >= len(self._points) * self._config.total:
            self._evaluate()
        self._report()

    def _on_training_end(self) -> None:
        self._evaluate()
        self._report()

    def _on_step(self) -> bool:
        return True

    def _evaluate(self) -> None:
        score = self._score(_InTraining(_scorer(self.model)))
        self._points.append(CurvePoint(timesteps=self.num_timesteps, score=score))

    def _score(self, policy: Policy) -> Score:
        config = self._config
        seeds = range(HELDOUT_SEED, HELDOUT_SEED + config.heldout_sessions)
        return run_sessions(
            policy, space=self._space, candidates=config.candidates, trials=config.trials, seeds=seeds
        ).score

    def _report(self) -> None:
        self._progress(Progress(timesteps=self.num_timesteps, total=self._config.total, curve=self.curve))
