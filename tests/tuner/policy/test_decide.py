"""Baselines, what to settle on, and which questions are refused."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.env.observation import mask
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialResult
from paceline.runtime.errors import InvalidRequest
from paceline.tuner.policy.decide import (
    DefaultPolicy,
    PlannerPolicy,
    Policy,
    RandomPolicy,
    recommend,
    settle,
)
from paceline.tuner.policy.store import StoredPolicy
from tests.tuner.policy.simulated import CANDIDATES, Session, simulated_session

DEFAULT = Strategy.of({"sync.mode": "allreduce"})
ask = functools.partial(recommend, PlannerPolicy(), candidates=CANDIDATES)


@pytest.fixture(params=["random", "planner", "learned"])
def explorer(request: pytest.FixtureRequest, policy: StoredPolicy) -> Policy:
    return {"random": RandomPolicy(seed=1), "planner": PlannerPolicy(), "learned": policy}[request.param]


def test_every_session_can_be_played_to_the_end(explorer: Policy) -> None:
    """A candidate is left to choose at any point, no choice is repeated, and equal questions get equal answers."""
    session = simulated_session(3, trials=0)
    trials = [*session.trials]
    for _ in session.case.candidates[1:]:
        action = explorer.choose(session.case, trials)
        assert action == explorer.choose(session.case, tuple(trials))
        assert mask(session.case, trials, max_candidates=CANDIDATES)[action]
        trials.append(dataclasses.replace(trials[0], strategy=session.case.candidates[action]))
    assert {trial.strategy for trial in trials} == set(session.case.candidates)
    assert explorer.choose(session.case, trials) == 0


def test_random_policy_depends_on_seed_and_session() -> None:
    first, second = simulated_session(3, trials=0), simulated_session(4, trials=0)
    chosen = {
        name: [RandomPolicy(seed).choose(session.case, session.trials) for seed in range(100)]
        for name, session in (("first", first), ("second", second))
    }
    assert set(chosen["first"]) == set(range(1, CANDIDATES))
    assert chosen["first"] != chosen["second"]


def test_default_policy_has_nothing_to_try(sessions: list[Session]) -> None:
    assert all(DefaultPolicy().choose(session.case, session.trials) == 0 for session in sessions)


BLANK = simulated_session(0, trials=0).trials[0]


def trial(goodput: float, *, halfwidth: float = 1.0, failure: str | None = None, period: int = 2) -> TrialResult:
    return dataclasses.replace(
        BLANK,
        strategy=Strategy.of({"sync.mode": "local_sgd", "sync.period": period}),
        goodput=goodput,
        goodput_interval=(goodput - halfwidth, goodput + halfwidth),
        failure=failure,
    )


REFERENCE = dataclasses.replace(trial(100.0), strategy=DEFAULT)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="nothing tried"),
        pytest.param([trial(101.5)], id="intervals overlap"),
        pytest.param([trial(102.0)], id="intervals touch"),
        pytest.param([trial(50.0)], id="worse"),
        pytest.param([trial(500.0, failure="diverged")], id="failed"),
        pytest.param([trial(math.inf)], id="infinite"),
        pytest.param([trial(math.nan)], id="not a number"),
        pytest.param([trial(500.0, halfwidth=math.nan)], id="interval unknown"),
        pytest.param([trial(500.0, halfwidth=math.inf)], id="interval infinite"),
        pytest.param([dataclasses.replace(trial(500.0), strategy=DEFAULT)], id="default again"),
    ],
)
def test_settles_on_the_default_unless_a_trial_is_clearly_better(others: list[TrialResult]) -> None:
    found = settle(DEFAULT, [REFERENCE, *others])
    assert (found.strategy, found.expected_gain, found.uncertainty) == (DEFAULT, 1.0, 0.0)


def test_settles_on_the_default_without_a_reference() -> None:
    assert settle(DEFAULT, []).strategy == DEFAULT
    failed = dataclasses.replace(REFERENCE, failure="worker_lost")
    assert settle(DEFAULT, [failed, trial(500.0)]).strategy == DEFAULT


def test_settles_on_the_best_of_the_clearly_better() -> None:
    trials = [REFERENCE, trial(120.0, period=2), trial(150.0, period=4), trial(900.0, halfwidth=800.0, period=8)]
    found = settle(DEFAULT, trials)
    assert found.strategy["sync.period"] == 4
    assert found.expected_gain == pytest.approx(1.5)
    assert found.uncertainty == pytest.approx(math.hypot(1 / 150, 1 / 100) / 1.96)


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.0, 1e3)), max_size=6))
def test_never_settles_on_anything_measured_worse(measured: Sequence[tuple[float, float]]) -> None:
    trials = [trial(goodput, halfwidth=halfwidth, period=2 + n) for n, (goodput, halfwidth) in enumerate(measured)]
    found = settle(DEFAULT, [REFERENCE, *trials])
    chosen = next(tried for tried in [REFERENCE, *trials] if tried.strategy == found.strategy)
    assert chosen.goodput >= REFERENCE.goodput
    assert found.expected_gain == pytest.approx(chosen.goodput / REFERENCE.goodput)


def test_recommends_a_candidate_and_what_the_belief_expects_of_it(sessions: list[Session]) -> None:
    session = sessions[3]
    found = ask(**session.question(remaining=2))
    assert found == ask(**session.question(remaining=2))
    assert found.strategy in session.case.candidates
    assert found.strategy not in {trial.strategy for trial in session.trials}
    forecast = session.case.belief.predict([found.strategy], session.trials)
    assert found.expected_gain == pytest.approx(math.exp(forecast.mean[0]))
    assert found.uncertainty == pytest.approx(forecast.std[0])


def test_recommends_before_the_first_trial(sessions: list[Session]) -> None:
    found = ask(**{**sessions[3].question(), "trials": ()})
    assert found.strategy in sessions[3].case.candidates


def test_settles_when_no_trial_remains(sessions: list[Session]) -> None:
    for session in sessions:
        found = ask(**session.question(remaining=0))
        assert found == settle(session.case.space.default, session.trials)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, {"workload": "other"}, "trial 1 has workload other"),
        (0, {"cluster": "other"}, "trial 0 has cluster other"),
        (1, {"world_size": 999}, "trial 1 has world size 999"),
        (2, {"strategy": DEFAULT}, "trial 2 .* is none of the session's"),
    ],
)
def test_trials_of_another_session_are_refused(number: int, change: dict[str, object], message: str) -> None:
    question = simulated_session(9, trials=3).question()
    trials = [*question["trials"]]
    trials[number] = dataclasses.replace(trials[number], **change)
    with pytest.raises(InvalidRequest, match=message):
        ask(**{**question, "trials": trials})


def test_first_trial_must_be_the_reference() -> None:
    question = simulated_session(9, trials=3).question()
    with pytest.raises(InvalidRequest, match="reference trial"):
        ask(**{**question, "trials": question["trials"][1:]})


def test_trials_must_have_the_seed_of_the_session() -> None:
    """Random candidates of one seed are, almost surely, not those of another."""
    session = simulated_session(9, trials=11)
    with pytest.raises(InvalidRequest, match="seed that the session began with"):
        recommend(PlannerPolicy(), **{**session.question(), "seed": 10, "candidates": 3})
