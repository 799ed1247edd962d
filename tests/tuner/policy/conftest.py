"""A stored policy whose learned part matters, made in no time, and simulated sessions to ask it about."""

from pathlib import Path

import pytest
import torch

from paceline.env.observation import CONTEXT_FEATURES, candidate_features
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.evaluate import LearningCurve
from paceline.tuner.policy.network import CandidateScorer
from paceline.tuner.policy.store import FORMAT, Manifest, StoredPolicy, save
from tests.tuner.policy.simulated import CANDIDATES, Session, simulated_session


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    space = knob_space()
    return Manifest(
        format=FORMAT,
        knob_version=space.version,
        candidate_features=candidate_features(space),
        context_features=CONTEXT_FEATURES,
        hidden=(16, 16),
        prior_scale=20.0,
        candidates=CANDIDATES,
        training={},
        learning_curve=LearningCurve(baselines={}, points=()),
    )


@pytest.fixture(scope="session")
def scorer(manifest: Manifest) -> CandidateScorer:
    """Random weights, large enough to overrule the prior now and then."""
    scorer = manifest.scorer()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.normal_(generator=generator)
    return scorer


@pytest.fixture(scope="session")
def policy(manifest: Manifest, scorer: CandidateScorer, tmp_path_factory: pytest.TempPathFactory) -> StoredPolicy:
    return save(manifest, scorer, tmp_path_factory.mktemp("policies") / "policy")


@pytest.fixture
def folder(manifest: Manifest, scorer: CandidateScorer, tmp_path: Path) -> Path:
    """A folder with that policy, to be damaged."""
    save(manifest, scorer, tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture(scope="session")
def sessions() -> list[Session]:
    return [simulated_session(seed, trials=seed % 5) for seed in range(8)]
