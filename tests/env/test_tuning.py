"""The environment as Gymnasium and Stable-Baselines3 see it, and as a session behaves."""

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

from paceline.env.backends import SimulatorBackend
from paceline.env.gain import best_trial
from paceline.env.observation import TuningCase
from paceline.env.tuning import FAILURE_COST, TuningEnv
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Categorical, Number
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import Conflict, InvalidRequest, WorkerFailure
from paceline.runtime.knobs import knob_space

ClusterOf = Callable[..., Cluster]
SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def env() -> Iterator[TuningEnv]:
    """The registered environment, unwrapped."""
    made = gymnasium.make("paceline/Tuning-v0").unwrapped
    yield made
    made.close()


def play(env: TuningEnv, seed: int, actions: Sequence[Any] = ()) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """One episode with random allowed actions, or with the given ones; what each step returned."""
    rng = np.random.default_rng(seed)
    steps: list[tuple[Any, ...]] = [env.reset(seed=seed)]
    taken: list[Any] = []
    while True:
        action = actions[len(taken)] if actions else rng.choice(np.flatnonzero(env.action_masks()))
        taken.append(action)
        steps.append(env.step(action))
        if steps[-1][2]:
            return steps, taken


def test_gymnasium_accepts_it(env: TuningEnv) -> None:
    with warnings.catch_warnings(action="error"):
        gymnasium_check(env)


def test_stable_baselines3_accepts_it(env: TuningEnv) -> None:
    with warnings.catch_warnings(action="error"):
        sb3_check(env)


def test_registering_imports_neither_torch_nor_grpc() -> None:
    code = "import sys, paceline.env; sys.exit(bool({'torch', 'grpc', 'paceline.env.tuning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCES)}, check=False).returncode == 0


@pytest.mark.parametrize("seed", range(5))
def test_replayed_trajectories_are_identical(env: TuningEnv, seed: int) -> None:
    steps, actions = play(env, seed)
    again, _ = play(TuningEnv(), seed, actions)
    for first, second in zip(steps, again, strict=True):
        for name, array in first[0].items():
            np.testing.assert_array_equal(array, second[0][name])
        assert first[1:] == second[1:]


def test_an_episode_ends_with_its_budget(env: TuningEnv) -> None:
    steps, actions = play(env, 3)
    assert len(actions) == env.case.trials_budget == 6
    assert [step[2] for step in steps[1:]] == [False] * 5 + [True]
    assert not any(step[3] for step in steps[1:])
    with pytest.raises(Conflict, match="used up"):
        env.step(0)


class FailingTopK(SimulatorBackend):
    """Every trial with top-k runs out of memory."""

    def run(self, case: TuningCase, strategy: Strategy, rng: np.random.Generator) -> TrialResult:
        """As the simulator does, but for the label."""
        result = super().run(case, strategy, rng)
        if strategy["compress.codec"] == "topk":
            return dataclasses.replace(result, failure="oom", message="out of memory")
        return result


def test_the_return_is_the_best_log_gain_less_failures() -> None:
    env = TuningEnv(FailingTopK(knob_space()))
    failures = 0
    for seed in range(10):
        steps, _ = play(env, seed)
        best, gain = best_trial(env.trials)
        failed = sum(trial.failure is not None for trial in env.trials)
        failures += failed
        assert best["compress.codec"] != "topk"
        assert sum(step[1] for step in steps[1:]) == pytest.approx(gain - FAILURE_COST * failed)
        assert steps[-1][4]["best"] == best
    assert failures > 0


def test_a_failed_trial_is_a_labelled_result() -> None:
    space = knob_space()
    extreme = {
        "compress.codec": "topk",
        "compress.ratio": 0.001,
        "compress.error_feedback": False,
        "sync.mode": "local_sgd",
        "sync.period": 64,
    }
    backend, labels = SimulatorBackend(space), []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        case = backend.begin(rng)
        strategy = space.strategy(extreme)
        result = backend.run(case, strategy, rng)
        labels.append(result.failure)
        assert np.isfinite(backend.true_log_goodput(case, [strategy])[0]) == (result.failure is None)
        if result.failure is not None:
            assert result.strategy == strategy
            assert (result.goodput, result.examples_per_second) == (0.0, 0.0)
            assert result.message
    assert {None, "diverged"} <= set(labels) <= {None, "diverged", "oom"}


def test_a_refused_action_changes_nothing(env: TuningEnv) -> None:
    env.reset(seed=0)
    before, _, _, _, info = env.step(5)
    state = env.np_random.bit_generator.state
    for action, why in ((0, "tried before"), (5, "tried before")):
        after, reward, terminated, truncated, refusal = env.step(action)
        assert why in refusal["refused"]
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert refusal["best"] == info["best"]
        for name, array in after.items():
            np.testing.assert_array_equal(array, before[name])
    assert len(env.trials) == 2
    assert env.np_random.bit_generator.state == state


def small_space() -> KnobSpace:
    """Eight strategies."""
    known = {knob.name: knob for knob in knob_space().knobs}
    narrowed = {
        "compress.codec": Categorical(choices=("fp16", "none")),
        "sync.mode": Categorical(choices=("allreduce",)),
        "sync.bucket_mb": Number(low=24, high=25, integer=True),
        "precision.compute": Categorical(choices=("bf16", "fp32")),
    }
    others = ("mapping.batch_share", "mapping.order")
    knobs = [dataclasses.replace(known[name], domain=domain) for name, domain in narrowed.items()]
    return KnobSpace(knobs=(*knobs, *(known[name] for name in others)))


def test_a_case_may_have_fewer_candidates_than_actions(workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    backend = SimulatorBackend(small_space(), candidates=16, trials=10, workload=workload, cluster=cluster_of("a", "a"))
    env = TuningEnv(backend)
    env.reset(seed=0)
    assert len(env.case.candidates) == 8
    _, _, _, _, info = env.step(8)
    assert "does not exist" in info["refused"]
    steps, actions = play(env, 0)
    assert sorted(actions) == [0, 0, 0, *range(1, 8)]
    assert steps[-1][2]


def test_what_is_no_action_is_an_error(env: TuningEnv) -> None:
    with pytest.raises(Conflict, match="call reset first"):
        env.step(0)
    with pytest.raises(Conflict, match="call reset first"):
        env.action_masks()
    env.reset(seed=0)
    for action in (-1, 32, 1.5):
        with pytest.raises(InvalidRequest, match="from 0 to 31"):
            env.step(action)


def test_without_a_reference_there_is_no_session() -> None:
    class Broken(SimulatorBackend):
        def run(self, case: TuningCase, strategy: Strategy, rng: np.random.Generator) -> TrialResult:
            result = super().run(case, strategy, rng)
            return dataclasses.replace(result, failure="timeout", message="no step in 60 s")

    with pytest.raises(WorkerFailure, match=r"reference trial .* failed: timeout; no step in 60 s"):
        TuningEnv(Broken(knob_space())).reset(seed=0)


def test_a_workload_that_never_fits_is_refused(workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    backend = SimulatorBackend(knob_space(), workload=workload, cluster=cluster_of("a", "a", memory=1e6))
    with pytest.raises(InvalidRequest, match="toy does not fit into the memory of toy"):
        backend.begin(np.random.default_rng(0))


def test_render_shows_each_trial() -> None:
    env = gymnasium.make("paceline/Tuning-v0", render_mode="ansi").unwrapped
    play(env, 0)
    title, *lines = env.render().splitlines()
    assert env.case.cluster.name in title
    assert len(lines) == len(env.trials) == 7
    assert lines[0].split() == ["0", "+0.000", "default"]
    for line, trial in zip(lines[1:], env.trials[1:], strict=True):
        assert line.endswith(trial.strategy.describe(env.case.space.default))


def test_simulated_results_are_consistent(env: TuningEnv) -> None:
    env.reset(seed=1)
    (trial,) = env.trials
    assert trial.steps * env.case.workload.global_batch == trial.samples
    assert trial.examples_per_second == pytest.approx(trial.samples / trial.seconds)
    assert trial.step_seconds.total == pytest.approx(trial.seconds / trial.steps)
    assert trial.goodput == pytest.approx(trial.examples_per_second)
    low, high = trial.goodput_interval
    assert low < trial.goodput < high
    ranks, gradient = trial.world_size, env.case.workload.gradient_bytes
    assert set(trial.wire_bytes) <= {*(tier.name for tier in env.case.cluster.tiers), "cluster"}
    assert sum(trial.wire_bytes.values()) == pytest.approx(2 * (ranks - 1) * gradient * trial.steps)
