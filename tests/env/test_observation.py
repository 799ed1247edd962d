"""The observation: bounded, pure, and laid out as policies were trained for."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.env.backends import SimulatorBackend
from paceline.env.observation import (
    BOUND,
    CONTEXT_FEATURES,
    Observation,
    TuningCase,
    candidate_features,
    encode,
    mask,
    observation_space,
)
from paceline.env.tuning import TuningEnv
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space

ClusterOf = Callable[..., Cluster]

GOLDEN = Path(__file__).with_name("golden_layout.json")
SOURCES = Path(__file__).parents[2] / "src"
MAX_CANDIDATES = 40


def session(seed: int, *, trials: int = 4, candidates: int = 32) -> tuple[TuningCase, list[TrialResult]]:
    """A simulated case and its trials: the reference and then candidate 1, 2, ..."""
    rng = np.random.default_rng(seed)
    backend = SimulatorBackend(knob_space(), candidates=candidates, trials=trials)
    case = backend.begin(rng)
    return case, [backend.run(case, strategy, rng) for strategy in case.candidates[: trials + 1]]


def table(case: TuningCase, observation: Observation) -> list[dict[str, float]]:
    """The candidates' rows as one dict of feature name -> value each, padding left out."""
    names = candidate_features(case.space)
    rows = observation["candidates"].reshape(MAX_CANDIDATES, len(names))[: len(case.candidates)]
    return [dict(zip(names, map(float, row), strict=True)) for row in rows]


def test_layout_is_the_committed_one() -> None:
    env = TuningEnv()
    layout = {
        "knob_version": env.backend.space.version,
        "candidate_features": list(candidate_features(env.backend.space)),
        "context_features": list(CONTEXT_FEATURES),
        "observation": {name: list(box.shape) for name, box in env.observation_space.spaces.items()},
        "bound": BOUND,
        "actions": int(env.action_space.n),
    }
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(layout, indent=2) + "\n")
    assert layout == json.loads(GOLDEN.read_text()), "policies trained before this change do not fit any more"


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), trials=st.integers(0, 5))
def test_observations_lie_in_the_space(seed: int, trials: int) -> None:
    case, results = session(seed)
    observation = encode(case, results[:trials], max_candidates=MAX_CANDIDATES)
    space = observation_space(case.space, MAX_CANDIDATES)
    assert space.contains(observation)
    padding = observation["candidates"].reshape(MAX_CANDIDATES, -1)[len(case.candidates) :]
    assert not padding.any()


def test_rows_say_what_was_measured() -> None:
    case, results = session(1)
    results[2] = dataclasses.replace(results[2], failure="timeout")
    results[3] = dataclasses.replace(results[3], goodput=results[0].goodput * np.e)
    results[4] = dataclasses.replace(results[4], goodput=float("nan"))
    observation = encode(case, results, max_candidates=MAX_CANDIDATES)
    rows = table(case, observation)
    tried, gain, failed = ([row[name] for row in rows] for name in ("trial.tried", "trial.log_gain", "trial.failed"))
    assert tried[:6] == [1, 1, 1, 1, 1, 0]
    assert failed[:6] == [0, 0, 1, 0, 1, 0]
    assert (gain[0], gain[2], gain[4], gain[5]) == (0, 0, 0, 0)
    assert gain[3] == pytest.approx(1.0)
    context = dict(zip(CONTEXT_FEATURES, observation["context"], strict=True))
    assert context["session.failures"] == 2
    assert context["session.best_log_gain"] == pytest.approx(max(gain))
    assert context["session.trials_left"] == 0


def test_rows_say_which_knobs_are_set() -> None:
    case, _ = session(1)
    rows = table(case, encode(case, [], max_candidates=MAX_CANDIDATES))
    for row, strategy in zip(rows, case.candidates, strict=True):
        assert row[f"sync.mode={strategy['sync.mode']}"] == 1
        assert sum(value for name, value in row.items() if name.startswith("sync.mode=")) == 1
        assert row["sync.period:in_use"] == (strategy["sync.mode"] in ("local_sgd", "diloco"))
        assert row["mapping.order=topology"] == (strategy["mapping.order"] == "topology")
        assert row["sync.chunk_mb:in_use"] == (strategy["sync.mode"] in ("hierarchical", "reduction_server"))
        assert 0 <= row["compress.ratio"] <= 1


def test_rows_say_what_a_mapping_changes(workload: WorkloadProfile, cluster_of: ClusterOf) -> None:
    space = knob_space()
    cluster = cluster_of(*"abcd", racks=("ac", "bd"), flops=(1e9, 1e9, 1e9, 3e9), rack_rates=(1e7, 2e7))
    mapping = {"mapping.order": "topology", "mapping.batch_share": "proportional"}
    changes = ({}, mapping, {"sync.mode": "hierarchical"}, mapping | {"sync.mode": "local_sgd", "sync.period": 64})
    candidates = tuple(space.strategy(change) for change in changes)
    case = TuningCase(space=space, workload=workload, cluster=cluster, candidates=candidates, trials_budget=1)
    observation = encode(case, [], max_candidates=MAX_CANDIDATES)
    rows = table(case, observation)
    # Two ranks of each rack send to the other; in topology order only one does.
    assert [row["mapping.log_ring_rate"] for row in rows] == pytest.approx([0, np.log(2), 0, np.log(2)])
    # Each has four of sixteen samples, which the fourth computes three times as fast.
    assert rows[0]["mapping.load_balance_error"] == pytest.approx(4 / (10 / 3) - 1)
    assert rows[1]["mapping.load_balance_error"] < 0.2
    share = [row["mapping.busiest_tier_share"] for row in rows]
    assert 0 < share[3] < share[2] < share[0] < 1
    context = dict(zip(CONTEXT_FEATURES, observation["context"], strict=True))
    assert context["cluster.log2_nodes"] == 2
    assert context["cluster.log2_racks"] == 1
    assert context["cluster.log_uplink_spread"] == pytest.approx(np.log(5))


def test_budget_is_observed() -> None:
    case, results = session(2)
    left = CONTEXT_FEATURES.index("session.trials_left")
    seen = [encode(case, results[:count], max_candidates=MAX_CANDIDATES)["context"][left] for count in range(1, 6)]
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_case_answers_alike_whatever_it_was_asked_before() -> None:
    case, results = session(3)
    asked, fresh = case, dataclasses.replace(case)
    for count in (5, 1, 3):
        encode(asked, results[:count], max_candidates=MAX_CANDIDATES)
    first, second = (encode(one, results, max_candidates=MAX_CANDIDATES) for one in (asked, fresh))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_another_process_sees_the_same() -> None:
    code = (
        "import sys; from paceline.env.tuning import TuningEnv; env = TuningEnv(); env.reset(seed=11);"
        "seen = env.step(3)[0]; sys.stdout.write(seen['candidates'].tobytes().hex() + seen['context'].tobytes().hex())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCES), "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    env = TuningEnv()
    env.reset(seed=11)
    seen = env.step(np.int64(3))[0]
    assert other.stdout == seen["candidates"].tobytes().hex() + seen["context"].tobytes().hex()


def test_mask_always_leaves_one() -> None:
    case, _ = session(4, candidates=6)
    results = []
    backend, rng = SimulatorBackend(knob_space()), np.random.default_rng(0)
    backend.begin(rng)
    for index, strategy in enumerate(case.candidates):
        allowed = mask(case, results, max_candidates=8)
        assert allowed.tolist() == [False] * index + [True] * (6 - index) + [False] * 2
        results.append(backend.run(case, strategy, rng))
    assert mask(case, results, max_candidates=8).tolist() == [True] + [False] * 7


def test_more_candidates_than_the_policy_ranks_are_refused() -> None:
    case, results = session(4)
    with pytest.raises(InvalidRequest, match="32 candidates; this policy ranks at most 16"):
        encode(case, results, max_candidates=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": ()}, "default"),
        ({"trials_budget": -1}, "negative"),
    ],
)
def test_a_malformed_case_is_refused(change: dict[str, Any], message: str) -> None:
    case, _ = session(4)
    with pytest.raises(InvalidRequest, match=message):
        dataclasses.replace(case, **change)
    with pytest.raises(InvalidRequest, match="distinct"):
        TuningCase(
            space=case.space,
            workload=case.workload,
            cluster=case.cluster,
            candidates=case.candidates[:1] * 2,
            trials_budget=1,
        )
