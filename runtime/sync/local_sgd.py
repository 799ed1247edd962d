"""Parameters averaged every few steps."""

from dataclasses import dataclass

from torch import Tensor

from paceline.runtime.sync.base import SYNC_MODES
from paceline.runtime.sync.periodic import Periodic, PeriodicConfig


@dataclass(frozen=True, kw_only=True)
class LocalSgdConfig(PeriodicConfig):
    """Local SGD has only the common knobs."""


@SYNC_MODES.register
class LocalSgd(Periodic):
    """Every `period` steps the parameters become their mean over all ranks.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767.
    """

    name = "local_sgd"
    Config = LocalSgdConfig

    def take(self, name: str, anchor: Tensor, change: Tensor) -> None:
        """Go the whole way."""
        anchor.sub_(change)
