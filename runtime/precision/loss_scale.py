"""What keeps fp16 gradients within range, and gradients that are not finite away from the weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps in a row with finite gradients after which the scale is doubled."""


class LossScale:
    """Factor on the loss, by which gradients are divided again before an exchange or the optimizer sees them.

    A step whose gradient is not finite is not to change anything; the scale is halved then, but never below 1. Source:
    Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, with the constants of torch.amp.GradScaler. That
    itself divides by the scale behind the backward pass, when gradients were long exchanged.
    """

    def __init__(self) -> None:
        self._scales = False
        self._scale = INITIAL_SCALE
        self._good_steps = 0
        self._finite = torch.tensor(True)
        self.checks = False
        """Whether steps whose gradient is not finite are skipped."""

    def configure(self, *, scales: bool, checks: bool) -> None:
        """What the strategy in force asks for. The scale is kept for when it is asked for again."""
        self._scales = scales
        self.checks = checks or scales

    @property
    def factor(self) -> float:
        """Factor on the loss; 1 where the recipe needs none."""
        return self._scale if self._scales else 1.0

    def unscale(self, gradient: Tensor) -> None:
        """Divide a gradient by the factor, in place.

        One that is not finite becomes NaN in every element: whichever of them a codec sends, the mean that all ranks
        get is not finite either, and they agree without another exchange.
        """
        if self.checks:
            finite = torch.linalg.vector_norm(gradient, math.inf).isfinite()
            self._finite = self._finite & finite
            gradient.mul_(torch.where(finite, 1 / self.factor, math.nan))

    def admits(self, gradients: Iterable[Tensor]) -> bool:
        """Whether the step may be made, with these gradients as the optimizer will see them. Moves the scale."""
        if not self.checks:
            return True
        norm = torch.nn.utils.get_total_norm(list(gradients), math.inf)
        finite, self._finite = self._finite & norm.isfinite(), torch.tensor(True)
        if self._scales:
            self._move(bool(finite))
        return bool(norm.isfinite())

    def _move(self, finite: bool) -> None:
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self._scale = max(1.0, self._scale / 2)
        elif self._good_steps == GROWTH_INTERVAL:
            self._scale, self._good_steps = self._scale * 2, 0

    def state(self) -> dict[str, float]:
        """The scale and the steps in a row with finite gradients, JSON-able."""
        return {"scale": self._scale, "good_steps": self._good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        """Take over what `state` returned."""
        self._scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
