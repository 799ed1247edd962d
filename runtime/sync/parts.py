"""Parameters cut into parts, each exchanged at times of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from paceline.runtime.compress.base import Layout
from paceline.runtime.domain.domains import Integers, parse_integers
from paceline.runtime.knobs import knob
from paceline.runtime.sync.base import SyncConfig

EVEN = "even"

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class LayeredConfig(SyncConfig):
    """Knobs of modes that can exchange some layers less often than others."""

    layer_periods: str = knob("sync.layer_periods", Integers(named=(EVEN,), low=1, high=64, most=8), default=EVEN)
    """How rarely layers are exchanged: `even`, all alike; or up to 8 numbers, 1 to 64, one for each of as many parts of
    the parameters, in model order and about equal in size: the part takes part in every so-manieth exchange only."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters that are exchanged in one piece."""

    layout: Layout
    """Their names and shapes."""
    parameters: tuple[nn.Parameter, ...]
    """The same in the same order."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that are exchanged in the same steps."""

    period: int
    """Steps between two exchanges."""
    phase: int
    """The exchanges are in the steps t with t modulo `period` equal to this."""
    buckets: tuple[Bucket, ...]
    """What is exchanged then."""

    def is_due(self, step: int) -> bool:
        """Whether the part is exchanged in this step of the trial; the first is 1."""
        return step % self.period == self.phase


def trainable(model: nn.Module) -> list[Named]:
    """The parameters that are trained, in model order."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def cut(parameters: Sequence[Named], count: int) -> list[list[Named]]:
    """Cut into so many runs about equal in elements; a run that lies inside one large parameter stays empty."""
    total = sum(parameter.numel() for _, parameter in parameters)
    runs: list[list[Named]] = [[] for _ in range(count)]
    before = 0
    for name, parameter in parameters:
        middle = (2 * before + parameter.numel()) * count // max(1, 2 * total)
        runs[min(middle, count - 1)].append((name, parameter))
        before += parameter.numel()
    return runs


def layers(model: nn.Module, layer_periods: str) -> list[tuple[int, list[Named]]]:
    """The parts of a model that `layer_periods` names, with the period of each."""
    periods = (1,) if layer_periods == EVEN else parse_integers(layer_periods)
    return list(zip(periods, cut(trainable(model), len(periods)), strict=True))


def stagger(
    model: nn.Module, *, period: int, layer_periods: str, fragments: int, bucket_bytes: int
) -> tuple[Part, ...]:
    """Cut each part that `layer_periods` names into fragments whose exchanges are spread evenly over its period."""
    return tuple(
        Part(
            period=period * times,
            phase=(index + 1) * period * times // fragments % (period * times),
            buckets=_buckets(fragment, bucket_bytes),
        )
        for times, parameters in layers(model, layer_periods)
        for index, fragment in enumerate(cut(parameters, fragments))
        if fragment
    )


def _buckets(parameters: Sequence[Named], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[list[Named]] = []
    filled = bucket_bytes
    for name, parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += size
    return tuple(
        Bucket(
            layout=tuple((name, parameter.shape) for name, parameter in bucket),
            parameters=tuple(parameter for _, parameter in bucket),
        )
        for bucket in buckets
    )
