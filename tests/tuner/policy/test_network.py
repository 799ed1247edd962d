"""The scorer treats candidates alike, and the untrained policy is the planner."""

import numpy as np
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.env.observation import CONTEXT_FEATURES, candidate_features, encode, observation_space
from paceline.runtime.knobs import knob_space
from paceline.tuner.policy.decide import PlannerPolicy, candidate_scores, choose_highest
from paceline.tuner.policy.network import CandidatePolicy, CandidateScorer, acquisition, rows_of
from paceline.tuner.policy.store import Manifest
from tests.tuner.policy.simulated import Session

FEATURES = len(candidate_features(knob_space()))
CONTEXT = len(CONTEXT_FEATURES)


def random_rows(candidates: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(candidates * FEATURES, generator=generator)
    return rows_of(table, torch.rand(CONTEXT, generator=generator), features=FEATURES)


def test_rows_repeat_the_context_behind_each_candidate() -> None:
    rows = rows_of(torch.arange(6.0).repeat(2, 1), torch.tensor([[7.0], [8.0]]), features=3)
    assert rows.tolist() == [[[0, 1, 2, 7], [3, 4, 5, 7]], [[0, 1, 2, 8], [3, 4, 5, 8]]]


def test_acquisition_reads_mean_and_std_of_the_belief() -> None:
    names = (*candidate_features(knob_space()), *CONTEXT_FEATURES)
    rows = torch.zeros(1, len(names))
    rows[0, names.index("belief.mean_log_gain")] = 0.25
    rows[0, names.index("belief.std_log_gain")] = 0.5
    assert acquisition(rows).tolist() == [0.75]


@settings(max_examples=30)
@given(candidates=st.integers(1, 70), seed=st.integers(0, 2**32), data=st.data())
def test_scores_follow_any_permutation_and_selection(
    candidates: int, seed: int, data: st.DataObject, scorer: CandidateScorer
) -> None:
    rows = random_rows(candidates, seed)
    some = data.draw(st.lists(st.integers(0, candidates - 1), min_size=1, unique=True))
    torch.testing.assert_close(scorer(rows[some]), scorer(rows)[some])


def test_untrained_policy_chooses_as_the_planner(manifest: Manifest, sessions: list[Session]) -> None:
    untrained = manifest.scorer()
    for session in sessions:
        chosen = choose_highest(untrained, session.case, session.trials)
        assert chosen == PlannerPolicy().choose(session.case, session.trials)


def test_learned_part_can_overrule_the_planner(scorer: CandidateScorer, sessions: list[Session]) -> None:
    pairs = [
        (choose_highest(scorer, session.case, session.trials), PlannerPolicy().choose(session.case, session.trials))
        for session in sessions
    ]
    assert any(learned != planned for learned, planned in pairs)


def test_equal_scores_go_to_the_lowest_allowed_index(sessions: list[Session]) -> None:
    session = sessions[0]
    assert choose_highest(lambda rows: rows[..., 0] * 0, session.case, ()) == 0
    # The reference trial has taken candidate 0.
    assert choose_highest(lambda rows: rows[..., 0] * 0, session.case, session.trials[:1]) == 1


def test_sb3_policy_acts_as_the_scorer_inside_it(scorer: CandidateScorer, sessions: list[Session]) -> None:
    candidates = len(sessions[0].case.candidates)
    policy = CandidatePolicy(
        observation_space(knob_space(), candidates),
        spaces.Discrete(candidates),
        lambda _: 1e-3,
        hidden=(16, 16),
        prior_scale=scorer.prior_scale,
    )
    policy.action_net.load_state_dict(scorer.state_dict())
    for session in sessions:
        observation = encode(session.case, session.trials, max_candidates=candidates)
        allowed = np.array(
            [strategy not in {t.strategy for t in session.trials} for strategy in session.case.candidates]
        )
        action, _ = policy.predict(observation, deterministic=True, action_masks=allowed)
        assert action == choose_highest(scorer, session.case, session.trials)
        scores = candidate_scores(scorer, session.case, session.trials)
        distribution = policy.get_distribution(policy.obs_to_tensor(observation)[0]).distribution
        expected = torch.log_softmax(torch.from_numpy(scores), dim=0)
        torch.testing.assert_close(distribution.logits[0].detach(), expected)
