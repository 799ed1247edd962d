"""A strategy: a full, legal assignment of knobs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from paceline.runtime.domain.domains import KnobValue


@dataclass(frozen=True)
class Strategy(Mapping[str, KnobValue]):
    """An immutable, hashable mapping from knob name to value, in sorted order.

    Only `KnobSpace.strategy` should build one from user input: it completes defaults and refuses illegal settings.
    """

    items_: tuple[tuple[str, KnobValue], ...]
    """Knob name and value, sorted by name."""

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> Self:
        """Build from any mapping, without checking it."""
        return cls(tuple(sorted(values.items())))

    @cached_property
    def _values(self) -> dict[str, KnobValue]:
        return dict(self.items_)

    def __getitem__(self, name: str) -> KnobValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self.items_)

    def differences(self, base: "Strategy") -> dict[str, KnobValue]:
        """The knobs whose value is not the one in `base`."""
        return {name: value for name, value in self.items() if base.get(name) != value}

    def describe(self, base: "Strategy") -> str:
        """One short line: what differs from `base`, or "default"."""
        changed = self.differences(base)
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "default"
