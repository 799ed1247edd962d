"""What a precision recipe is."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

from paceline.runtime.domain.knobs import Rule
from paceline.runtime.knobs import KnobConfig, NoKnobs
from paceline.runtime.registry import Registry


class PrecisionRecipe(ABC):
    """Chooses the number format of forward and backward; weights, gradients and optimizer stay fp32."""

    name: ClassVar[str]
    Config: ClassVar[type[KnobConfig]] = NoKnobs
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What it does not go together with."""

    @abstractmethod
    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """The context in which the loss is computed on `cpu` or `cuda`."""


RECIPES: Registry[type[PrecisionRecipe]] = Registry(
    "precision recipe", package="paceline.runtime.precision", entry_point_group="paceline.precision"
)
