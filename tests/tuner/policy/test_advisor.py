"""What a `--policy` stands for: it answers as the policy itself does, and is refused for another knob space."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.tuner.cli.stores import open_tracking, register
from paceline.tuner.cli.tune import open_advisor
from paceline.tuner.policy.decide import DefaultPolicy, PlannerPolicy, RandomPolicy, recommend
from paceline.tuner.policy.service import serving
from paceline.tuner.policy.store import StoredPolicy
from tests.tuner.policy.simulated import Session

SPACE = knob_space()
OTHER_SPACE = KnobSpace(knobs=SPACE.knobs[1:])
open_here = partial(open_advisor, seed=3)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'paceline.db'}"


@pytest.fixture(params=["folder", "served", "registered", "champion"])
def reference(request: pytest.FixtureRequest, folder: Path, policy: StoredPolicy, uri: str) -> Iterator[str | None]:
    """The same policy by each of the ways to name it."""
    match request.param:
        case "folder":
            yield str(folder)
        case "served":
            with serving(policy) as address:
                yield address
        case _:
            model, _ = register(policy, folder, open_tracking(uri))
            yield model if request.param == "registered" else None


def test_policy_answers_as_it_would_itself(
    reference: str | None, policy: StoredPolicy, sessions: list[Session], uri: str
) -> None:
    session = sessions[1]
    expected = recommend(policy, **session.question(), candidates=policy.manifest.candidates)
    with open_here(reference, SPACE, tracking_uri=uri) as advisor:
        assert advisor.ask(**session.question()) == expected
        assert advisor.name == f"policy {policy.digest[:12]}"


def test_policy_of_another_knob_space_is_refused(reference: str | None, uri: str) -> None:
    with pytest.raises(InvalidRequest, match=OTHER_SPACE.version), open_here(reference, OTHER_SPACE, tracking_uri=uri):
        pass


@pytest.mark.parametrize(
    "baseline", [PlannerPolicy(), DefaultPolicy(), RandomPolicy(3)], ids=lambda policy: policy.name
)
def test_baselines_go_by_their_names(
    baseline: PlannerPolicy | DefaultPolicy | RandomPolicy, sessions: list[Session], uri: str
) -> None:
    question = sessions[0].question()
    with open_here(baseline.name, SPACE, tracking_uri=uri) as advisor:
        assert advisor.ask(**question) == recommend(baseline, **question)


def test_planner_stands_in_where_no_champion_is_registered(uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_here(None, SPACE, tracking_uri=uri) as advisor:
        assert advisor.name == "planner"
    assert "is not registered: the planner chooses" in capsys.readouterr().err
