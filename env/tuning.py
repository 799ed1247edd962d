"""`paceline/Tuning-v0`: one episode is one tuning session."""

from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from paceline.env.backends import Backend, SimulatorBackend
from paceline.env.gain import best_trial, is_valid, log_gain
from paceline.env.observation import Observation, TuningCase, encode, mask, observation_space
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.errors import Conflict, InvalidRequest, WorkerFailure
from paceline.runtime.knobs import knob_space

FAILURE_COST = 0.05
"""What a failed trial costs in reward: the log gain of about 5 % more goodput."""


class TuningEnv(gymnasium.Env[Observation, np.int64]):
    """Find a strategy with more goodput than the default in a few trials.

    Observation: a Dict of `candidates` and `context`, see `paceline.env.observation.encode`.

    Action: Discrete, the index of the candidate to try. `action_masks` says which are allowed. An action that is
    not (tried before, or no candidate of this session) is refused: no trial runs, nothing changes, the reward is 0
    and `info["refused"]` says why. The budget is not charged either, so an agent that ignores the mask should run
    under a `TimeLimit`.

    Reward: by how much the trial raised the best measured log gain, log(goodput / the default's goodput), which
    starts at 0; `-FAILURE_COST` for a failed trial. The return is the log gain of the best strategy found, less
    the cost of failures.

    Episode: `reset` takes a case from the backend and runs the reference trial (default strategy, not charged). It
    is `terminated` when the budget of trials is used up; `truncated` only ever comes from outside.

    Info: `trial` (the last TrialResult), `strategy` (what it ran), `best` (best strategy so far).
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    observation_space: spaces.Dict  # type: ignore[assignment]
    action_space: spaces.Discrete

    def __init__(self, backend: Backend | None = None, *, render_mode: str | None = None) -> None:
        """Without a backend: the simulator with its defaults and this process's knob space."""
        backend = backend or SimulatorBackend(knob_space())
        self.backend = backend
        self.render_mode = render_mode
        self.observation_space = observation_space(backend.space, backend.max_candidates)
        self.action_space = spaces.Discrete(backend.max_candidates)
        self.case: TuningCase | None = None
        self.trials: list[TrialResult] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a session and run its reference trial. Raises WorkerFailure when that trial fails."""
        super().reset(seed=seed)
        case = self.backend.begin(self.np_random)
        reference = self.backend.run(case, case.candidates[0], self.np_random)
        if not is_valid(reference):
            label = reference.failure or "no goodput measured"
            raise WorkerFailure(f"the reference trial (default strategy) failed: {label}; {reference.message}")
        self.case, self.trials = case, [reference]
        return self._observation(case), self._info(reference)

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Run one trial. Raises InvalidRequest for an action out of range, Conflict outside a session."""
        if not self.action_space.contains(action):
            raise InvalidRequest(f"action {action} must be a whole number from 0 to {self.action_space.n - 1}")
        case = self._running_case()
        if self._trials_left(case) == 0:
            raise Conflict("the session's budget of trials is used up; call reset")
        if not self.action_masks()[action]:
            why = "was tried before" if action < len(case.candidates) else "does not exist in this session"
            info = self._info(self.trials[-1]) | {"refused": f"candidate {action} {why}"}
            return self._observation(case), 0.0, False, False, info
        _, best_before = best_trial(self.trials)
        trial = self.backend.run(case, case.candidates[action], self.np_random)
        self.trials.append(trial)
        reward = best_trial(self.trials)[1] - best_before if is_valid(trial) else -FAILURE_COST
        return self._observation(case), reward, self._trials_left(case) == 0, False, self._info(trial)

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Allowed actions, bool [max_candidates]; the name is the one sb3-contrib looks for."""
        return mask(self._running_case(), self.trials, max_candidates=self.backend.max_candidates)

    def render(self) -> str | None:
        """With `ansi`: one line per trial, with its log gain or failure label and what it changed."""
        if self.render_mode is None:
            return None
        case = self._running_case()
        lines = [f"{case.workload.name} on {case.cluster.name}"]
        for number, trial in enumerate(self.trials):
            gain = log_gain(trial, self.trials[0])
            outcome = f"{gain:+.3f}" if gain is not None else str(trial.failure or "invalid")
            lines.append(f"{number:3d}  {outcome:>10s}  {trial.strategy.describe(case.candidates[0])}")
        return "\n".join(lines)

    def close(self) -> None:
        """Close the backend. May be called again."""
        self.backend.close()

    def _running_case(self) -> TuningCase:
        if self.case is None:
            raise Conflict("no session is running; call reset first")
        return self.case

    def _trials_left(self, case: TuningCase) -> int:
        return case.trials_budget + 1 - len(self.trials)

    def _observation(self, case: TuningCase) -> Observation:
        return encode(case, self.trials, max_candidates=self.backend.max_candidates)

    def _info(self, trial: TrialResult) -> dict[str, Any]:
        return {"trial": trial, "strategy": trial.strategy, "best": best_trial(self.trials)[0]}
