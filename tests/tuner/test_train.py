"""Training: the same seed gives the same policy, PPO learns, and wrong configs are refused at once."""

import dataclasses
from pathlib import Path

import pytest

from paceline.runtime.errors import Conflict, InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.store import load
from paceline.tuner.train import HELDOUT_SEED, Progress, TrainConfig, train

TINY = TrainConfig(
    timesteps=60,
    environments=2,
    rollout_steps=16,
    candidates=4,
    trials=2,
    hidden=(8,),
    heldout_sessions=2,
    evaluations=2,
)


def test_stores_what_it_trained_and_reports_on_the_way(tmp_path: Path) -> None:
    reports: list[Progress] = []
    policy = train(TINY, tmp_path / "policy", reports.append)
    assert load(tmp_path / "policy").digest == policy.digest
    policy.require(knob_space())
    assert policy.manifest.training == {**dataclasses.asdict(TINY), "hidden": [8]}
    assert [(report.timesteps, report.total) for report in reports] == [(0, 64), (32, 64), (64, 64)]
    curve = policy.manifest.learning_curve
    assert [point.timesteps for point in curve.points] == [0, 32, 64]
    assert set(curve.baselines) == {"planner", "random", "default"}
    assert curve.baselines["default"].log_gain == 0.0
    # The untrained policy is the planner.
    assert curve.points[0].score == curve.baselines["planner"]
    assert any(parameter.any() for parameter in policy.scorer.correction[-1].parameters())


def test_equal_seeds_give_equal_policies(tmp_path: Path) -> None:
    first = train(TINY, tmp_path / "first")
    again = train(TINY, tmp_path / "again")
    other = train(dataclasses.replace(TINY, seed=1), tmp_path / "other")
    assert again.digest == first.digest
    assert other.digest != first.digest


def test_existing_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    reports: list[Progress] = []
    with pytest.raises(Conflict, match="already there"):
        train(TINY, tmp_path, reports.append)
    assert reports == []


@pytest.mark.slow
def test_learns_without_the_beliefs_advice(tmp_path: Path) -> None:
    """With the prior it begins at the planner's level, where there is next to nothing left to learn."""
    config = TrainConfig(timesteps=6_000, prior_scale=0.0, evaluations=1, heldout_sessions=60)
    curve = train(config, tmp_path / "policy").manifest.learning_curve
    untrained, trained = (point.score for point in curve.points)
    random = curve.baselines["random"]
    assert trained.regret + trained.regret_halfwidth < random.regret - random.regret_halfwidth
    assert trained.regret < untrained.regret / 2
    assert trained.log_gain - trained.log_gain_halfwidth > curve.baselines["default"].log_gain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timesteps": 0}, "timesteps=0 must be at least 1"),
        ({"candidates": 1}, "candidates=1 must be at least 2"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": HELDOUT_SEED}, f"seed={HELDOUT_SEED} must be below {HELDOUT_SEED}"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be positive and finite"),
        ({"prior_scale": float("inf")}, "prior_scale=inf must be finite"),
        ({"hidden": ()}, "must name at least one unit"),
        ({"hidden": (8, 0)}, "must name at least one unit"),
    ],
)
def test_wrong_configs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        dataclasses.replace(TINY, **change)
