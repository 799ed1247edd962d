"""The network: one scorer shared by all candidates, corrected from the belief's acquisition.

Scores do not depend on how many candidates there are, nor on their order, as in Deep Sets (Zaheer et al.,
arXiv:1703.06114), so the same weights rank the candidates of any session.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from paceline.env.observation import BELIEF_FEATURES, CONTEXT_FEATURES, TRIAL_FEATURES

OPTIMISM = 1.0
"""Standard deviations that the acquisition adds to the expected log gain."""

_TAIL = (*BELIEF_FEATURES, *TRIAL_FEATURES)


def _column(name: str) -> int:
    """Column of a belief or trial feature in rows as `rows_of` makes them, counted from the end."""
    return _TAIL.index(name) - len(_TAIL) - len(CONTEXT_FEATURES)


_MEAN, _STD = _column("belief.mean_log_gain"), _column("belief.std_log_gain")


def rows_of(candidates: Tensor, context: Tensor, *, features: int) -> Tensor:
    """Rows [..., M, F + C], one per candidate, of an observation: `candidates` [..., M * F] and `context` [..., C].

    `features` is F, the number of candidate features.
    """
    table = candidates.unflatten(-1, (-1, features))
    return torch.cat([table, context.unsqueeze(-2).expand(*table.shape[:-1], -1)], dim=-1)


def acquisition(rows: Tensor) -> Tensor:
    """Upper confidence bound of the log gain, [..., M]: belief mean + OPTIMISM x std (Auer, JMLR 3, 2002)."""
    return rows[..., _MEAN] + OPTIMISM * rows[..., _STD]


class CandidateScorer(nn.Module):
    """Logit of each candidate: its acquisition / temperature + a learned correction, zero at first."""

    def __init__(self, width: int, *, hidden: Sequence[int], prior_scale: float) -> None:
        """`width` = F + C; `hidden`: units per layer; `prior_scale` = 1 / temperature, 0 for no prior."""
        super().__init__()
        self.prior_scale = prior_scale
        self.correction = _mlp(width, hidden)
        output = self.correction[-1]
        assert isinstance(output, nn.Linear)
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits [..., M] of rows [..., M, F + C]."""
        correction: Tensor = self.correction(rows)
        return self.prior_scale * acquisition(rows) + correction.squeeze(-1)


class _Critic(nn.Module):
    """Expected return, from the mean and the maximum over the candidates of a shared embedding."""

    def __init__(self, width: int, *, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(width, hidden[0]), nn.Tanh())
        self.value = _mlp(2 * hidden[0], hidden)

    def forward(self, rows: Tensor) -> Tensor:
        """Values [B, 1] of rows [B, M, F + C]. Padding rows are alike in all sessions."""
        embedded = self.embedding(rows)
        value: Tensor = self.value(torch.cat([embedded.mean(-2), embedded.amax(-2)], dim=-1))
        return value


def _mlp(width: int, hidden: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.Tanh()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, 1))


class _Rows(BaseFeaturesExtractor):
    """Turns the observation into the rows [B, M, F + C] that both actor and critic read."""

    def __init__(self, observation_space: spaces.Dict, *, candidates: int) -> None:
        self._features = spaces.flatdim(observation_space["candidates"]) // candidates
        super().__init__(observation_space, self._features + spaces.flatdim(observation_space["context"]))

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        return rows_of(observations["candidates"], observations["context"], features=self._features)


class CandidatePolicy(MaskableActorCriticPolicy):
    """sb3-contrib's maskable actor-critic with `CandidateScorer` as its actor."""

    action_net: CandidateScorer

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        *,
        hidden: Sequence[int],
        prior_scale: float,
        **kwargs: Any,
    ) -> None:
        """`hidden` and `prior_scale` as in `CandidateScorer`; the rest is what sb3-contrib passes."""
        self._hidden = hidden
        self._prior_scale = prior_scale
        # An empty net_arch makes the part between features and heads the identity.
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            features_extractor_class=_Rows,
            features_extractor_kwargs={"candidates": int(action_space.n)},
            **kwargs,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        self._build_mlp_extractor()
        self.action_net = CandidateScorer(self.features_dim, hidden=self._hidden, prior_scale=self._prior_scale)
        self.value_net = _Critic(self.features_dim, hidden=self._hidden)  # type: ignore[assignment]
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )
