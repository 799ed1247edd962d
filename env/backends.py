"""Where the trials of a tuning session run: on a live runtime, or in the simulator."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from paceline.env.candidates import propose
from paceline.env.forms import Floats
from paceline.env.observation import TuningCase
from paceline.env.scenarios import random_cluster, random_workload
from paceline.env.simulator import Unknowns, simulate
from paceline.runtime.api import RuntimeAPI, run_to_result
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, StepSplit, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest, UnknownName

CANDIDATES = 32
"""Candidates of a session unless said otherwise."""
TRIALS = 6
"""Trials of a session unless said otherwise, the reference trial not counted."""
MAX_DRAWS = 1000
"""Cases drawn, of which at least one must have a default strategy that fits into memory."""
SEED_BOUND = 2**31
"""Seeds drawn for candidates and episodes are below this."""
SIMULATED_STEPS = 200
"""Steps that a simulated trial claims to have taken."""
MODEL_ERROR = 0.1
"""Standard deviation of the log goodput that no draw of the unknowns explains, one value per strategy and session."""


class Backend(Protocol):
    """Gives cases and runs their trials."""

    @property
    def space(self) -> KnobSpace:
        """Knob space of every case."""

    @property
    def max_candidates(self) -> int:
        """Upper bound of the number of candidates of a case."""

    def begin(self, rng: np.random.Generator) -> TuningCase:
        """Begin a session. All randomness comes from `rng`."""

    def run(self, case: TuningCase, strategy: Strategy, rng: np.random.Generator) -> TrialResult:
        """Run one trial of the session begun last. A failed trial is a labelled result, not an exception."""

    def close(self) -> None:
        """Release what the backend holds. Idempotent."""


class SimulatorBackend:
    """Simulated trials: each session draws anew what the simulator does not know and, unless fixed, the rest too."""

    def __init__(
        self,
        space: KnobSpace,
        *,
        candidates: int = CANDIDATES,
        trials: int = TRIALS,
        cluster: Cluster | None = None,
        workload: WorkloadProfile | None = None,
    ) -> None:
        self.space = space
        self.max_candidates = candidates
        self._trials = trials
        self._cluster = cluster
        self._workload = workload

    def begin(self, rng: np.random.Generator) -> TuningCase:
        """Draw a case whose default strategy fits into memory.

        Raises InvalidRequest when none does, which means that the fixed workload is too large for the fixed cluster.
        """
        for _ in range(MAX_DRAWS):
            workload = self._workload or random_workload(rng)
            cluster = self._cluster or random_cluster(rng, workload)
            self._truth = Unknowns.sample(rng, 1)
            if not simulate(workload, cluster, [self.space.default], self._truth).failed.any():
                break
        else:
            raise InvalidRequest(f"workload {workload.name} does not fit into the memory of {cluster.name}")
        self._session, seed = (int(value) for value in rng.integers(SEED_BOUND, size=2))
        return TuningCase(
            space=self.space,
            workload=workload,
            cluster=cluster,
            candidates=propose(self.space, workload, cluster, count=self.max_candidates, seed=seed),
            trials_budget=self._trials,
        )

    def true_log_goodput(self, case: TuningCase, strategies: Sequence[Strategy]) -> Floats:
        """What trials of the session begun last would measure but for noise, [S]; -inf for one that fails."""
        prediction = simulate(case.workload, case.cluster, strategies, self._truth)
        goodput = np.log(prediction.goodput[:, 0]) + [self._model_error(strategy) for strategy in strategies]
        return np.where(prediction.failed[:, 0], -np.inf, goodput)

    def run(self, case: TuningCase, strategy: Strategy, rng: np.random.Generator) -> TrialResult:
        """Predict under the session's truth, with model error and measurement noise."""
        prediction = simulate(case.workload, case.cluster, [strategy], self._truth)
        result = TrialResult(
            workload=case.workload.name,
            cluster=case.cluster.name,
            strategy=strategy,
            world_size=case.cluster.size,
            generations=1,
            steps=0,
            samples=0,
            seconds=0.0,
            examples_per_second=0.0,
            examples_per_second_interval=(0.0, 0.0),
            goodput=0.0,
            goodput_interval=(0.0, 0.0),
            goodput_basis="reference",
            heldout_curve=(),
            step_seconds=StepSplit(),
        )
        if prediction.failed[0, 0]:
            label = "oom" if prediction.out_of_memory[0, 0] else "diverged"
            return dataclasses.replace(result, failure=label, message="predicted by the simulator")
        noise = self._truth.noise[0]
        factor = float(np.exp(self._model_error(strategy) + noise * rng.standard_normal()))
        throughput = case.workload.global_batch / float(prediction.step_seconds[0, 0]) * factor
        goodput = throughput * float(prediction.efficiency[0, 0])
        low, high = float(np.exp(-1.96 * noise)), float(np.exp(1.96 * noise))
        samples = SIMULATED_STEPS * case.workload.global_batch
        sent = zip(prediction.demand.tiers, prediction.demand.wire_bytes[0].tolist(), strict=True)
        return dataclasses.replace(
            result,
            steps=SIMULATED_STEPS,
            samples=samples,
            seconds=samples / throughput,
            examples_per_second=throughput,
            examples_per_second_interval=(throughput * low, throughput * high),
            goodput=goodput,
            goodput_interval=(goodput * low, goodput * high),
            step_seconds=StepSplit(
                compute=float(prediction.compute_seconds[0, 0]) / factor,
                communication_exposed=float(prediction.exposed_seconds[0, 0]) / factor,
                communication_hidden=float(prediction.hidden_seconds[0, 0]) / factor,
            ),
            wire_bytes={tier: round(count * SIMULATED_STEPS) for tier, count in sent if count},
            load_balance_error=float(prediction.demand.load_balance_error[0]),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _model_error(self, strategy: Strategy) -> float:
        key = zlib.crc32(repr(strategy.items_).encode())
        return MODEL_ERROR * float(np.random.default_rng([self._session, key]).standard_normal())


class LiveBackend:
    """Trials on a runtime, each with the same seed and budget: they start alike and see the same samples."""

    def __init__(
        self,
        runtime: RuntimeAPI,
        *,
        workload: str,
        budget: Budget,
        candidates: int = CANDIDATES,
        trials: int = TRIALS,
        expected_version: str | None = None,
    ) -> None:
        """Ask the runtime for its knob space. The caller keeps the runtime and closes it.

        Raises UnknownName when the runtime does not list the workload, and InvalidRequest when its knob space is
        not the one of `expected_version`.
        """
        self.space = runtime.describe_knobs()
        if expected_version is not None and self.space.version != expected_version:
            raise InvalidRequest(
                f"the runtime has knob space {self.space.version}, but {expected_version} is expected; "
                f"use a runtime with {expected_version}, or train a policy for {self.space.version}"
            )
        profiles = {profile.name: profile for profile in runtime.list_workloads()}
        if workload not in profiles:
            raise UnknownName("workload", workload, profiles)
        self.max_candidates = candidates
        self._workload = profiles[workload]
        self._runtime = runtime
        self._budget = budget
        self._trials = trials

    def begin(self, rng: np.random.Generator) -> TuningCase:
        """Describe the cluster as it is now and propose candidates for it."""
        cluster = self._runtime.describe_cluster()
        seed = int(rng.integers(SEED_BOUND))
        return TuningCase(
            space=self.space,
            workload=self._workload,
            cluster=cluster,
            candidates=propose(self.space, self._workload, cluster, count=self.max_candidates, seed=seed),
            trials_budget=self._trials,
        )

    def run(self, case: TuningCase, strategy: Strategy, rng: np.random.Generator) -> TrialResult:
        """Run the trial to its end. Raises what the runtime raises when it cannot run trials at all."""
        return run_to_result(
            self._runtime, TrialSpec(workload=case.workload.name, strategy=strategy, budget=self._budget)
        )

    def close(self) -> None:
        """The runtime is the caller's, so it stays open."""
