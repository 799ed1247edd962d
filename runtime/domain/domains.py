"""The sets of values a knob may take.

A domain checks a value, reads one from text, lists a small grid of representative values for candidate generation,
and maps a value to [0, 1] for learning. Values are plain `bool`, `int`, `float` or `str`.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

KnobValue = bool | int | float | str


class ValueRefused(ValueError):
    """The value is outside the domain; the text states the rule and the nearest legal value."""


@dataclass(frozen=True, kw_only=True)
class Boolean:
    """True or False; in text: true/false, on/off, yes/no, 1/0."""

    def check(self, value: Any, *, world_size: int | None = None) -> KnobValue:
        """Return the value. Raises ValueRefused unless it is a bool."""
        if not isinstance(value, bool):
            raise ValueRefused("must be true or false")
        return value

    def parse(self, text: str) -> KnobValue:
        """Read the value from command-line text; raises ValueRefused."""
        if text.lower() in ("true", "on", "yes", "1"):
            return True
        if text.lower() in ("false", "off", "no", "0"):
            return False
        raise ValueRefused("must be true or false")

    def grid(self, count: int) -> tuple[KnobValue, ...]:
        """Both values, whatever the count."""
        return (False, True)

    def unit(self, value: KnobValue) -> float:
        """0.0 for False, 1.0 for True."""
        return float(value)


@dataclass(frozen=True, kw_only=True)
class Categorical:
    """One of a few names."""

    choices: tuple[str, ...]
    """Legal names, in a fixed order; at least one."""

    def check(self, value: Any, *, world_size: int | None = None) -> KnobValue:
        """Return the name. Raises ValueRefused with the nearest choice."""
        if value in self.choices and isinstance(value, str):
            return value
        raise ValueRefused(f"must be one of {', '.join(self.choices)}{self._nearest(value)}")

    def _nearest(self, value: Any) -> str:
        near = difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.4)
        return f"; did you mean {near[0]!r}?" if near else ""

    def parse(self, text: str) -> KnobValue:
        """Return the text itself if it is a choice; raises ValueRefused."""
        return self.check(text)

    def grid(self, count: int) -> tuple[KnobValue, ...]:
        """All choices, whatever the count."""
        return self.choices

    def unit(self, value: KnobValue) -> float:
        """Position among the choices, scaled to [0, 1]. Learners should prefer a one-hot of `choices`."""
        return self.choices.index(str(value)) / max(1, len(self.choices) - 1)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number in [low, high]."""

    low: float
    """Smallest legal value, inclusive."""
    high: float
    """Largest legal value, inclusive."""
    log: bool = False
    """Whether equal ratios, not equal differences, are equal steps; needs low > 0."""
    integer: bool = False
    """Whether only whole numbers are legal."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a log domain needs low > 0, got {self.low}")
        # The wire has doubles; Number(low=1) and Number(low=1.0) must have one space version.
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def check(self, value: Any, *, world_size: int | None = None) -> KnobValue:
        """Return the number as int or float. Raises ValueRefused with the nearest legal number."""
        rule = f"must be {'a whole number' if self.integer else 'a number'} from {self.low:g} to {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueRefused(rule)
        nearest = min(max(value, self.low), self.high)
        nearest = round(nearest) if self.integer else float(nearest)
        if nearest != value:
            raise ValueRefused(f"{rule}; nearest legal: {nearest:g}")
        return nearest

    def parse(self, text: str) -> KnobValue:
        """Read the number from text; raises ValueRefused."""
        try:
            number = float(text)
        except ValueError:
            return self.check(text)
        return self.check(int(number) if number.is_integer() else number)

    def grid(self, count: int) -> tuple[KnobValue, ...]:
        """At most `count` values, evenly spaced in the domain's own scale, both ends included."""
        spaced = np.geomspace if self.log else np.linspace
        values = [float(value) for value in spaced(self.low, self.high, count)]
        if self.integer:
            return tuple(sorted({round(value) for value in values}))
        return (self.low, *(float(f"{value:.3g}") for value in values[1:-1]), self.high)

    def unit(self, value: KnobValue) -> float:
        """Position between low and high in the domain's own scale."""
        if self.log:
            return math.log(float(value) / self.low) / math.log(self.high / self.low)
        return (float(value) - self.low) / (self.high - self.low)


def parse_integers(text: str) -> tuple[int, ...]:
    """Read "3,1,2" as (3, 1, 2). Raises ValueRefused."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueRefused("must be whole numbers separated by commas") from None


@dataclass(frozen=True, kw_only=True)
class PerRank:
    """A named rule, or one whole number per rank written as "3,1,2,2".

    With `permutation`, entry r is the index of the device that rank r runs on: a permutation of 0..world_size-1.
    Without, entry r is the positive weight of rank r.
    """

    named: tuple[str, ...]
    """Names of the registered rules."""
    permutation: bool
    """Whether the numbers are a permutation (True) or positive weights (False)."""

    def check(self, value: Any, *, world_size: int | None = None) -> KnobValue:
        """Return the text in canonical form. The length is checked only where the world size is given."""
        if value in self.named:
            return str(value)
        what = "a permutation of 0..n-1" if self.permutation else "one positive whole number per rank"
        rule = f"must be {', '.join(self.named)} or {what}, n = {world_size or 'world size'}"
        near = difflib.get_close_matches(str(value), self.named, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if world_size:
            even = range(world_size) if self.permutation else (1,) * world_size
            hint = hint or f"; for example {','.join(map(str, even))}"
        if not isinstance(value, str):
            raise ValueRefused(rule + hint)
        try:
            numbers = parse_integers(value)
        except ValueRefused:
            raise ValueRefused(rule + hint) from None
        legal = sorted(numbers) == list(range(len(numbers))) if self.permutation else min(numbers) > 0
        if not legal or (world_size is not None and len(numbers) != world_size):
            raise ValueRefused(rule + hint)
        return ",".join(map(str, numbers))

    def parse(self, text: str) -> KnobValue:
        """Read a name or a list from text; raises ValueRefused."""
        return self.check(text)

    def grid(self, count: int) -> tuple[KnobValue, ...]:
        """The named rules. Explicit lists depend on the cluster and are proposed by mappers."""
        return self.named

    def unit(self, value: KnobValue) -> float:
        """Position among the named rules in [0, 1]; 1.0 for an explicit list."""
        return self.named.index(str(value)) / len(self.named) if value in self.named else 1.0


@dataclass(frozen=True, kw_only=True)
class Integers:
    """A named rule, or a few whole numbers in [low, high], written as "1,2,4"."""

    named: tuple[str, ...]
    """Names of the rules; at least one."""
    low: int
    """Smallest legal number, inclusive."""
    high: int
    """Largest legal number, inclusive."""
    most: int
    """How many numbers there may be."""
    distinct: bool = False
    """Whether no number may stand twice."""

    def check(self, value: Any, *, world_size: int | None = None) -> KnobValue:
        """Return the text in canonical form. Raises ValueRefused with the rule and the nearest name or an example."""
        if value in self.named:
            return str(value)
        different = " different" if self.distinct else ""
        rule = (
            f"must be {', '.join(self.named)} or at most {self.most}{different} whole numbers from {self.low} to "
            f"{self.high}"
        )
        near = difflib.get_close_matches(str(value), self.named, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else f"; for example {self.low},{self.low + 1}"
        try:
            numbers = parse_integers(value) if isinstance(value, str) else ()
        except ValueRefused:
            numbers = ()
        fits = all(self.low <= number <= self.high for number in numbers)
        twice = self.distinct and len(set(numbers)) < len(numbers)
        if not 0 < len(numbers) <= self.most or not fits or twice:
            raise ValueRefused(rule + hint)
        return ",".join(map(str, numbers))

    def parse(self, text: str) -> KnobValue:
        """Read a name or a list from text; raises ValueRefused."""
        return self.check(text)

    def grid(self, count: int) -> tuple[KnobValue, ...]:
        """The named rules."""
        return self.named

    def unit(self, value: KnobValue) -> float:
        """Position among the named rules in [0, 1]; 1.0 for an explicit list."""
        return self.named.index(str(value)) / len(self.named) if value in self.named else 1.0


Domain = Boolean | Categorical | Number | PerRank | Integers
