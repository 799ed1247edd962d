"""Tuning sessions in the simulator, at any point of their course."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.env.backends import SimulatorBackend
from paceline.env.candidates import propose
from paceline.env.observation import TuningCase
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.knobs import knob_space

CANDIDATES = 12


@dataclass(frozen=True)
class Session:
    """A tuning session in the simulator and what it measured so far."""

    case: TuningCase
    trials: tuple[TrialResult, ...]
    seed: int
    """Seed of the candidates."""

    def question(self, *, remaining: int = 3) -> dict[str, Any]:
        """The arguments of `recommend` and of `PolicyClient.recommend`."""
        return {
            "space": self.case.space,
            "workload": self.case.workload,
            "cluster": self.case.cluster,
            "trials": self.trials,
            "remaining": remaining,
            "seed": self.seed,
        }


def simulated_session(seed: int, *, trials: int) -> Session:
    """The reference trial and then `trials` random ones, on a random workload and cluster."""
    rng = np.random.default_rng(seed)
    backend = SimulatorBackend(knob_space(), candidates=CANDIDATES, trials=trials + 3)
    drawn = backend.begin(rng)
    candidates = propose(drawn.space, drawn.workload, drawn.cluster, count=CANDIDATES, seed=seed)
    case = TuningCase(
        space=drawn.space,
        workload=drawn.workload,
        cluster=drawn.cluster,
        candidates=candidates,
        trials_budget=trials + 3,
    )
    others = rng.permutation(len(candidates) - 1)[:trials] + 1
    tried = [candidates[0], *(candidates[index] for index in others)]
    return Session(case, tuple(backend.run(case, strategy, rng) for strategy in tried), seed)
