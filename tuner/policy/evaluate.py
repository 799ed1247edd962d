"""How good a policy is: whole sessions in the simulator, judged by what the recommended strategy truly gains."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.env.backends import SimulatorBackend
from paceline.env.tuning import TuningEnv
from paceline.runtime.domain.knobs import KnobSpace
from paceline.tuner.policy.decide import Policy, settle


@dataclass(frozen=True, kw_only=True)
class Score:
    """Means over sessions."""

    log_gain: float
    """True log goodput of the strategy settled on, less that of the default."""
    log_gain_halfwidth: float
    """Half of the 95 % interval of `log_gain`, normal approximation."""
    regret: float
    """1 - true goodput of the strategy settled on / the best candidate's."""
    regret_halfwidth: float
    """Half of the 95 % interval of `regret`."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """How good a policy is after some training."""

    timesteps: int
    """Simulated trials learned from; 0: untrained."""
    score: Score
    """On the held-out sessions, which are the same every time."""


@dataclass(frozen=True, kw_only=True)
class LearningCurve:
    """A training seen from outside."""

    baselines: dict[str, Score]
    """The policies that do not learn, by name, on the same held-out sessions."""
    points: tuple[CurvePoint, ...]
    """Oldest first."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """The outcome of S >= 2 sessions, by session."""

    log_gain: npt.NDArray[np.float64]
    """As in `Score`, shape [S]."""
    regret: npt.NDArray[np.float64]
    """As in `Score`, shape [S]."""

    @property
    def score(self) -> Score:
        """The means."""
        return Score(
            log_gain=float(self.log_gain.mean()),
            log_gain_halfwidth=_halfwidth(self.log_gain),
            regret=float(self.regret.mean()),
            regret_halfwidth=_halfwidth(self.regret),
        )


def _halfwidth(values: npt.NDArray[np.float64]) -> float:
    return 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))


def run_sessions(policy: Policy, *, space: KnobSpace, candidates: int, trials: int, seeds: Iterable[int]) -> Sessions:
    """One session per seed, each with `trials` trials after the reference trial. Equal arguments, equal outcome.

    Two policies meet the same cases, truths and noise under the same seed.
    """
    backend = SimulatorBackend(space, candidates=candidates, trials=trials)
    env = TuningEnv(backend)
    gains, regrets = [], []
    for seed in seeds:
        env.reset(seed=seed)
        case = env.case
        assert case is not None
        terminated = False
        while not terminated:
            action = policy.choose(case, env.trials)
            if not env.action_masks()[action]:
                break
            terminated = env.step(np.int64(action))[2]
        chosen = case.candidates.index(settle(space.default, env.trials).strategy)
        goodput = backend.true_log_goodput(case, case.candidates)
        gains.append(goodput[chosen] - goodput[0])
        regrets.append(1 - math.exp(goodput[chosen] - goodput.max()))
    return Sessions(log_gain=np.array(gains), regret=np.array(regrets))
