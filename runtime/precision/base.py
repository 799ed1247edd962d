"""What a precision recipe is."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
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
    scales_loss: ClassVar[bool] = False
    """Whether small gradients would become 0 in its format, so that the loss is scaled up; see `LossScale`."""
    nearest: ClassVar[str] = "fp32"
    """The recipe to use where the devices lack something."""

    @classmethod
    def missing(cls, kinds: Collection[str]) -> str | None:
        """What devices of these kinds lack to compute so, as the end of a sentence that begins with "needs"; None if
        nothing. Kinds are those of `Device.kind`."""
        return None

    @abstractmethod
    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """The context in which the loss is computed on `cpu` or `cuda`."""

    def step_context(self) -> AbstractContextManager[object]:
        """The context of a whole step, backward pass included."""
        return nullcontext()


def lacks_cuda(kinds: Collection[str], capability: tuple[int, int]) -> str | None:
    """`PrecisionRecipe.missing` of a recipe for CUDA devices of at least this compute capability."""
    if all(kind.startswith("cuda:") and _capability(kind) >= capability for kind in kinds):
        return None
    return f"CUDA devices of compute capability {capability[0]}.{capability[1]} or higher"


def _capability(kind: str) -> tuple[int, int]:
    major, minor = kind.removeprefix("cuda:").split(".")
    return int(major), int(minor)


RECIPES: Registry[type[PrecisionRecipe]] = Registry(
    "precision recipe", package="paceline.runtime.precision", entry_point_group="paceline.precision"
)
