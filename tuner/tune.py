"""A tuning session: a reference trial, a few live trials one after the other, and a confirmation in pairs."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from scipy import stats

from paceline.env.backends import TRIALS
from paceline.env.gain import best_trial, is_valid, log_gain
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import TrialEvent
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.tuner.policy.decide import Recommendation
from paceline.tuner.tracking.session import TuningSession
from paceline.tuner.tracking.store import TrackingStore

ROLE = "paceline.role"
"""Tag of a trial's MLflow run: `reference`, `trial` or `confirm`."""

Watch = Callable[[str, RuntimeAPI, TrialSpec, Callable[[TrialEvent], None]], TrialResult]
"""Runs a trial to its end under a title, and passes on each event."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How much to try."""

    budget: Budget
    """Of every trial of the session."""
    trials: int = TRIALS
    """Trials that the policy chooses, at least 1; it may end earlier when it has nothing more to try."""
    confirm: int = 5
    """Pairs of runs in the confirmation, at least 2."""
    seed: int = 0
    """Seed of initial weights, sample order and candidates, not negative."""
    start_snapshot: str = ""
    """Snapshot that every trial starts from; empty: from the seed."""

    def __post_init__(self) -> None:
        for name, low in (("trials", 1), ("confirm", 2), ("seed", 0)):
            if (value := getattr(self, name)) < low:
                raise InvalidRequest(f"tuning: {name}={value} must be at least {low}")

    def spec(self, workload: str, strategy: Strategy) -> TrialSpec:
        """A trial of the session: all start alike and see the same samples."""
        return TrialSpec(
            workload=workload,
            strategy=strategy,
            budget=self.budget,
            seed=self.seed,
            start_snapshot=self.start_snapshot,
        )


class Ask(Protocol):
    """`paceline.tuner.policy.decide.recommend` with its policy, or `PolicyClient.recommend`."""

    def __call__(
        self,
        *,
        space: KnobSpace,
        workload: WorkloadProfile,
        cluster: Cluster,
        trials: Sequence[TrialResult],
        remaining: int,
        seed: int,
    ) -> Recommendation:
        """The next strategy to try."""


@dataclass(frozen=True, kw_only=True)
class Advisor:
    """What chooses the trials."""

    name: str
    """For the record, e.g. `planner`, or a policy's name and the beginning of its digest."""
    ask: Ask
    """Answers what to try next."""


@dataclass(frozen=True, kw_only=True)
class LiveTrial:
    """A trial of a session."""

    role: str
    """`reference`, `trial` or `confirm`."""
    result: TrialResult
    """What it measured, or how it failed."""
    mlflow_run_id: str | None
    """Its run; None where nothing is recorded."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Goodput relative to that of the default strategy; 1 = equal."""

    ratio: float = 1.0
    """The estimate."""
    interval: tuple[float, float] = (1.0, 1.0)
    """Its 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The best candidate against the default strategy, in alternating runs from the same start."""

    strategy: Strategy
    """The candidate."""
    pairs: tuple[tuple[LiveTrial, LiveTrial], ...]
    """Runs of the default and of the candidate that followed each other, at least one pair."""

    @property
    def gain(self) -> Gain | None:
        """What the candidate gains; None when one of the runs failed, so that nothing is confirmed.

        Student's t over the pairs' differences of log goodput: what slows down both runs of a pair cancels out.
        """
        gains = [log_gain(candidate.result, default.result) for default, candidate in self.pairs]
        valid = [gain for gain in gains if gain is not None]
        if len(valid) < max(2, len(gains)):
            return None
        middle = statistics.fmean(valid)
        half = float(stats.t.ppf(0.975, len(valid) - 1)) * statistics.stdev(valid) / math.sqrt(len(valid))
        return Gain(ratio=math.exp(middle), interval=(math.exp(middle - half), math.exp(middle + half)))


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The outcome of a session."""

    reference: LiveTrial
    """The default strategy. When it failed, nothing else was tried."""
    trials: tuple[LiveTrial, ...]
    """Those that the policy chose, oldest first, failed ones too."""
    confirmation: Confirmation | None
    """None when no trial had more goodput than the reference trial."""
    mlflow_run_id: str | None
    """The session's run; None where nothing is recorded."""

    @property
    def is_confirmed(self) -> bool:
        """Whether the candidate's interval clears the default's goodput."""
        gain = self.confirmation.gain if self.confirmation else None
        return gain is not None and gain.interval[0] > 1

    @property
    def recommended(self) -> Strategy:
        """The candidate if it is confirmed, else the default strategy: never one that is worse."""
        return self.recommended_run.result.strategy

    @property
    def recommended_run(self) -> LiveTrial:
        """The newest run of the recommended strategy."""
        if self.confirmation is None:
            return self.reference
        default, candidate = self.confirmation.pairs[-1]
        return candidate if self.is_confirmed else default

    @property
    def gain(self) -> Gain:
        """What the recommended strategy gains; exactly 1 for the default."""
        gain = self.confirmation.gain if self.confirmation else None
        return gain if gain is not None and self.is_confirmed else Gain()


def tune(
    runtime: RuntimeAPI,
    workload: WorkloadProfile,
    config: TuneConfig,
    *,
    advisor: Advisor,
    watch: Watch,
    tracking: TrackingStore | None = None,
) -> TuningResult:
    """Run a session. A failed trial is a labelled result; raises what runtime, policy and tracking store refuse with.

    With a tracking store, the session is a parent run and each trial a child run.
    """
    space, cluster = runtime.describe_knobs(), runtime.describe_cluster()
    record = (
        TuningSession(
            tracking,
            workload=workload,
            cluster=cluster,
            knob_version=space.version,
            name=f"tune {workload.name}",
            params={"policy": advisor.name, "trials": config.trials, "confirm": config.confirm, "seed": config.seed},
        )
        if tracking
        else nullcontext()
    )
    with record as session:
        running = _Running(runtime, workload, config, space=space, cluster=cluster, watch=watch, session=session)
        result = running.tune(advisor.ask)
        if session is not None:
            low, high = result.gain.interval
            session.log({"gain": result.gain.ratio, "gain_low": low, "gain_high": high})
            session.tag("paceline.recommended", result.recommended.describe(space.default))
            session.log_json(
                "recommended.json", {"strategy": dict(result.recommended), **dataclasses.asdict(result.gain)}
            )
        return result


class _Running:
    """A session under way."""

    def __init__(
        self,
        runtime: RuntimeAPI,
        workload: WorkloadProfile,
        config: TuneConfig,
        *,
        space: KnobSpace,
        cluster: Cluster,
        watch: Watch,
        session: TuningSession | None,
    ) -> None:
        self._runtime = runtime
        self._workload = workload
        self._config = config
        self._space = space
        self._cluster = cluster
        self._watch = watch
        self._session = session

    def tune(self, ask: Ask) -> TuningResult:
        reference = self._run("reference", "reference trial", self._space.default)
        trials = self._try(ask, reference) if is_valid(reference.result) else ()
        best, _ = best_trial([each.result for each in (reference, *trials)])
        return TuningResult(
            reference=reference,
            trials=trials,
            confirmation=self._confirm(best) if best != self._space.default else None,
            mlflow_run_id=self._session.run_id if self._session else None,
        )

    def _try(self, ask: Ask, reference: LiveTrial) -> tuple[LiveTrial, ...]:
        config, done = self._config, [reference]
        while (number := len(done)) <= config.trials:
            results = [each.result for each in done]
            strategy = ask(
                space=self._space,
                workload=self._workload,
                cluster=self._cluster,
                trials=results,
                remaining=config.trials + 1 - number,
                seed=config.seed,
            ).strategy
            if strategy in [result.strategy for result in results]:
                break
            done.append(self._run("trial", f"trial {number} of {config.trials}", strategy))
        return tuple(done[1:])

    def _confirm(self, candidate: Strategy) -> Confirmation:
        pairs: list[tuple[LiveTrial, LiveTrial]] = []
        count = self._config.confirm
        while len(pairs) < count and all(is_valid(each.result) for pair in pairs for each in pair):
            title = f"confirmation {len(pairs) + 1} of {count}"
            order = (self._space.default, candidate)
            # Every other pair the other way round, so that a steady drift of the machine favours neither.
            turns = order if len(pairs) % 2 == 0 else order[::-1]
            runs = {strategy: self._run("confirm", title, strategy) for strategy in turns}
            pairs.append((runs[self._space.default], runs[candidate]))
        return Confirmation(strategy=candidate, pairs=tuple(pairs))

    def _run(self, role: str, title: str, strategy: Strategy) -> LiveTrial:
        spec = self._config.spec(self._workload.name, strategy)
        title = f"{title}: {strategy.describe(self._space.default)}"
        if self._session is None:
            result = self._watch(title, self._runtime, spec, lambda event: None)
            return LiveTrial(role=role, result=result, mlflow_run_id=None)
        run = self._session.start_trial(spec, name=title)
        run.tag(ROLE, role)
        result = self._watch(title, self._runtime, spec, run.log_event)
        return LiveTrial(role=role, result=result, mlflow_run_id=run.run_id)
