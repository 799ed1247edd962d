"""What a policy sees of a tuning session: pure functions of the case and the trials so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from paceline.env.belief import Belief
from paceline.env.demand import demand
from paceline.env.gain import best_trial, is_valid, log_gain
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import Categorical, Integers, PerRank
from paceline.runtime.domain.knobs import Knob, KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.mapping import device_order, ring_rate

Observation = dict[str, npt.NDArray[np.float32]]

BOUND = 10.0
"""Every entry of an observation lies in [-BOUND, BOUND]."""

MAPPING_FEATURES = (
    "mapping.log_ring_rate",
    "mapping.load_balance_error",
    "mapping.busiest_tier_share",
)
BELIEF_FEATURES = (
    "belief.mean_log_gain",
    "belief.std_log_gain",
    "belief.failure_probability",
)
TRIAL_FEATURES = ("trial.tried", "trial.log_gain", "trial.failed")
CONTEXT_FEATURES = (
    "workload.log10_parameters",
    "workload.log10_parameter_tensors",
    "workload.log10_flops_per_sample",
    "workload.log10_global_batch",
    "cluster.log2_world_size",
    "cluster.log2_nodes",
    "cluster.log2_racks",
    "cluster.log10_flops",
    "cluster.log_flops_spread",
    "cluster.log10_mem_bw",
    "cluster.log10_link_bandwidth",
    "cluster.log_uplink_spread",
    "cluster.log10_latency",
    "belief.communication_share",
    "session.trials_left",
    "session.best_log_gain",
    "session.failures",
)


@dataclass(frozen=True, kw_only=True)
class TuningCase:
    """One tuning session's given facts: what is trained, where, and what may be tried."""

    space: KnobSpace
    """Knob space of the runtime that runs the trials."""
    workload: WorkloadProfile
    """What is trained."""
    cluster: Cluster
    """Where; every trial uses all devices."""
    candidates: tuple[Strategy, ...]
    """Legal, distinct strategies; index 0 is the default. An action is an index into this tuple."""
    trials_budget: int
    """Trials of the session, the reference trial not counted; at least 0."""

    def __post_init__(self) -> None:
        if not self.candidates or self.candidates[0] != self.space.default:
            raise InvalidRequest("candidate 0 must be the default strategy of the knob space")
        if len(set(self.candidates)) < len(self.candidates):
            raise InvalidRequest("candidates must be distinct")
        if self.trials_budget < 0:
            raise InvalidRequest(f"trials_budget={self.trials_budget} must not be negative")

    @cached_property
    def belief(self) -> Belief:
        """The belief about this case; it holds no state of a session."""
        return Belief(self.workload, self.cluster, self.space.default)

    @cached_property
    def knob_features(self) -> npt.NDArray[np.float32]:
        """Shape [candidates, knob features]: the fixed part of the candidate features."""
        rows = [
            [x for knob in self.space.knobs for x in _encode_knob(self.space, knob, strategy)]
            for strategy in self.candidates
        ]
        return np.array(rows, dtype=np.float32)

    @cached_property
    def mapping_features(self) -> npt.NDArray[np.float32]:
        """Shape [candidates, 3]: what the probe says of each candidate's mapping, in the order of MAPPING_FEATURES.

        The log of its ring's rate relative to the default's; its load-balance error; and how long an exchange keeps
        the busiest tier busy, as a part of that and the slowest rank's computing.
        """
        facts = demand(self.workload, self.cluster, self.candidates)
        orders = {strategy["mapping.order"]: strategy for strategy in self.candidates}
        rates = {
            order: ring_rate(self.cluster, device_order(strategy, self.cluster, self.cluster.size))
            for order, strategy in orders.items()
        }
        default = rates[self.space.default["mapping.order"]]
        busy = facts.busy_seconds
        rows = [
            [math.log(rates[strategy["mapping.order"]] / default) for strategy in self.candidates],
            facts.load_balance_error,
            busy / (busy + facts.slowest_work),
        ]
        return np.array(rows, dtype=np.float32).T

    @cached_property
    def context_features(self) -> npt.NDArray[np.float32]:
        """Shape [13]: the fixed part of the context, in the order of CONTEXT_FEATURES."""
        workload, devices = self.workload, self.cluster.devices
        flops = [device.profile.flops for device in devices]
        racks = next((len(tier.groups) for tier in self.cluster.tiers if tier.name == "rack"), 1)
        uplinks = [rate for tier in self.cluster.tiers for rate in tier.uplinks] or [1.0]
        return np.array(
            [
                math.log10(workload.parameters) - 6,
                math.log10(workload.parameter_tensors) - 2,
                math.log10(workload.flops_per_sample) - 9,
                math.log10(workload.global_batch) - 2,
                math.log2(len(devices)),
                math.log2(len({device.node for device in devices})),
                math.log2(racks),
                math.log10(sum(flops) / len(flops)) - 11,
                math.log(max(flops) / min(flops)),
                math.log10(min(device.profile.mem_bw for device in devices)) - 10,
                math.log10(min((link.bandwidth for link in self.cluster.links), default=1e12)) - 9,
                math.log(max(uplinks) / min(uplinks)),
                math.log10(max(1e-9, *(device.profile.net_latency for device in devices))) + 4,
            ],
            dtype=np.float32,
        )


def candidate_features(space: KnobSpace) -> tuple[str, ...]:
    """Names of the candidate features in order: F of them."""
    knobs = [name for knob in space.knobs for name in _knob_features(knob)]
    return (*knobs, *MAPPING_FEATURES, *BELIEF_FEATURES, *TRIAL_FEATURES)


def observation_space(space: KnobSpace, max_candidates: int) -> spaces.Dict:
    """The Gymnasium space of `encode`: `candidates` [max_candidates * F], `context` [C], float32 in +-BOUND."""
    shapes = {
        "candidates": (max_candidates * len(candidate_features(space)),),
        "context": (len(CONTEXT_FEATURES),),
    }
    return spaces.Dict({name: spaces.Box(-BOUND, BOUND, shape, np.float32) for name, shape in shapes.items()})


def encode(case: TuningCase, trials: Sequence[TrialResult], *, max_candidates: int) -> Observation:
    """The observation after these trials: the first is the reference trial, the rest follow in order.

    Returns `candidates`, float32 [max_candidates * F], and `context`, float32 [C]; features are named by
    `candidate_features` and CONTEXT_FEATURES. `candidates` is a table of one row of F features per candidate, with
    rows of zeros after the last, flattened row by row because Stable-Baselines3 wants vectors: reshape it to
    [max_candidates, F]. Equal arguments give equal arrays. Raises InvalidRequest when the case has more than
    `max_candidates` candidates.
    """
    if len(case.candidates) > max_candidates:
        raise InvalidRequest(
            f"the case has {len(case.candidates)} candidates; this policy ranks at most {max_candidates}"
        )
    forecast = case.belief.predict(case.candidates, trials)
    tried = {trial.strategy: trial for trial in trials}
    measured = [_encode_trial(tried.get(strategy), trials) for strategy in case.candidates]
    beliefs = np.column_stack([forecast.mean, forecast.std, forecast.failure_probability])
    rows = np.column_stack([case.knob_features, case.mapping_features, beliefs, measured])
    candidates = np.zeros((max_candidates, rows.shape[1]), dtype=np.float32)
    candidates[: len(rows)] = rows
    session = [
        forecast.communication_share,
        (case.trials_budget - len(trials) + 1) / max(1, case.trials_budget) if trials else 1.0,
        best_trial(trials)[1] if trials else 0.0,
        sum(not is_valid(trial) for trial in trials),
    ]
    context = np.concatenate([case.context_features, np.array(session, dtype=np.float32)])
    return {
        "candidates": np.clip(candidates, -BOUND, BOUND).ravel(),
        "context": np.clip(context, -BOUND, BOUND),
    }


def mask(case: TuningCase, trials: Sequence[TrialResult], *, max_candidates: int) -> npt.NDArray[np.bool_]:
    """Which actions are allowed, bool [max_candidates]: the candidates that no trial has tried yet.

    When all have been tried, candidate 0 (the default) stays allowed, so at least one action always is.
    """
    tried = {trial.strategy for trial in trials}
    allowed = np.zeros(max_candidates, dtype=np.bool_)
    allowed[: len(case.candidates)] = [strategy not in tried for strategy in case.candidates]
    if not allowed.any():
        allowed[0] = True
    return allowed


def _knob_features(knob: Knob) -> list[str]:
    domain = knob.domain
    if isinstance(domain, Categorical):
        names = [f"{knob.name}={choice}" for choice in domain.choices]
    elif isinstance(domain, PerRank | Integers):
        names = [f"{knob.name}={rule}" for rule in (*domain.named, "explicit")]
    else:
        names = [knob.name]
    return names if knob.requires is None else [*names, f"{knob.name}:in_use"]


def _encode_knob(space: KnobSpace, knob: Knob, strategy: Strategy) -> list[float]:
    domain, value = knob.domain, strategy[knob.name]
    if isinstance(domain, Categorical):
        code = [float(value == choice) for choice in domain.choices]
    elif isinstance(domain, PerRank | Integers):
        code = [float(value == rule) for rule in domain.named]
        code.append(float(value not in domain.named))
    else:
        code = [domain.unit(value)]
    return code if knob.requires is None else [*code, float(space.in_use(knob, strategy))]


def _encode_trial(trial: TrialResult | None, trials: Sequence[TrialResult]) -> tuple[float, float, float]:
    """Tried flag, measured log gain, failed flag; values as in TRIAL_FEATURES."""
    if trial is None:
        return (0.0, 0.0, 0.0)
    gain = log_gain(trial, trials[0])
    return (1.0, 0.0, 1.0) if gain is None else (1.0, gain, 0.0)
