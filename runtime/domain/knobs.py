"""Knobs and the knob space: what may be set, and which settings go together.

A knob that belongs to some plug-ins of a kind (for example `sync.period`, declared by `local_sgd` alone) may leave
its default only while the kind's selector knob names one of them. Plug-ins that do not go together with other settings
declare rules. These declarations serve the command line's message, the INVALID_ARGUMENT status, the environment's
action mask and the simulator.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from paceline.runtime.domain.domains import Domain, KnobValue, ValueRefused
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import IllegalStrategy, UnknownName


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A knob may leave its default only while another knob has one of the given values."""

    knob: str
    """Name of the selector knob, e.g. `sync.mode`."""
    values: tuple[str, ...]
    """The selector's values that use the dependent knob."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """While one knob has certain values, another may only have certain values."""

    knob: str
    """Name of the knob that restricts, e.g. `compress.codec`."""
    values: tuple[str, ...]
    """Its values that do."""
    other: str
    """Name of the knob that is restricted, e.g. `compress.tier`."""
    allowed: tuple[str, ...]
    """Values that the other may have then; at least one."""
    because: str
    """The reason, as the rest of a sentence that begins with "because"."""

    def permits(self, values: Mapping[str, KnobValue]) -> bool:
        """Whether the rule lets these values of all knobs stand."""
        return values[self.knob] not in self.values or values[self.other] in self.allowed


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting with a name, a domain and a default."""

    name: str
    """Dotted name, `<group>.<setting>`."""
    doc: str
    """Meaning, unit and range, one sentence."""
    domain: Domain
    """Legal values."""
    default: KnobValue
    """The value in the default strategy (plain DDP, fp32)."""
    requires: Requirement | None = None
    """When the knob is in use; None: always."""


@dataclass(frozen=True, kw_only=True)
class KnobSpace:
    """All knobs of one runtime."""

    knobs: tuple[Knob, ...]
    """Sorted by name."""
    rules: tuple[Rule, ...] = ()
    """Which values do not go together."""

    @cached_property
    def version(self) -> str:
        """Twelve hex digits of a hash over everything but the documentation. Equal versions mean equal spaces."""
        content = [
            {**asdict(knob), "doc": None, "domain": [type(knob.domain).__name__, asdict(knob.domain)]}
            for knob in self.knobs
        ]
        rules = [{**asdict(rule), "because": None} for rule in self.rules]
        return hashlib.sha256(json.dumps([content, rules], sort_keys=True).encode()).hexdigest()[:12]

    def __getitem__(self, name: str) -> Knob:
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise UnknownName("knob", name, (knob.name for knob in self.knobs))

    @cached_property
    def default(self) -> Strategy:
        """The strategy that users run today: every knob at its default."""
        return Strategy.of({knob.name: knob.default for knob in self.knobs})

    def parse(self, settings: list[str]) -> dict[str, KnobValue]:
        """Read `KNOB=VALUE` texts. Raises UnknownName or IllegalStrategy.

        A knob that is set by name must be in use, even at its default: whoever names it expects an effect.
        """
        values: dict[str, KnobValue] = {}
        for setting in settings:
            name, separator, text = setting.partition("=")
            if not separator:
                raise IllegalStrategy(f"setting {setting!r} must be written KNOB=VALUE")
            knob = self[name]
            try:
                values[name] = knob.domain.parse(text)
            except ValueRefused as refused:
                raise IllegalStrategy(f"{name}={text}: {refused}") from None
        for name in values:
            self._check_in_use(self[name], {**self.default, **values})
        return values

    def strategy(self, settings: Mapping[str, KnobValue], *, world_size: int | None = None) -> Strategy:
        """Complete `settings` with defaults and check the whole.

        With a `world_size`, per-rank lists must have that length. Raises UnknownName for a name that is no knob and
        IllegalStrategy for a value outside its domain or a combination that no plug-in allows.
        """
        values = dict(self.default)
        for name, value in settings.items():
            knob = self[name]
            try:
                values[name] = knob.domain.check(value, world_size=world_size)
            except ValueRefused as refused:
                raise IllegalStrategy(f"{name}={value}: {refused}") from None
        for knob in self.knobs:
            if values[knob.name] != knob.default:
                self._check_in_use(knob, values)
        for rule in self.rules:
            if not rule.permits(values):
                raise IllegalStrategy(
                    f"{rule.other}={values[rule.other]} does not go with {rule.knob}={values[rule.knob]}, because "
                    f"{rule.because}; set {rule.other}={rule.allowed[0]}"
                )
        return Strategy.of(values)

    def is_legal(self, settings: Mapping[str, KnobValue], *, world_size: int | None = None) -> bool:
        """Whether `strategy` would accept the settings."""
        try:
            self.strategy(settings, world_size=world_size)
        except (UnknownName, IllegalStrategy):
            return False
        return True

    def in_use(self, knob: Knob, values: Mapping[str, KnobValue]) -> bool:
        """Whether the knob has an effect under these values."""
        return knob.requires is None or values[knob.requires.knob] in knob.requires.values

    def _check_in_use(self, knob: Knob, values: Mapping[str, KnobValue]) -> None:
        if not self.in_use(knob, values):
            assert knob.requires is not None
            selector, users = knob.requires.knob, knob.requires.values
            raise IllegalStrategy(
                f"{knob.name}={values[knob.name]} has no effect with {selector}={values[selector]}; "
                f"set {selector}={users[0]}, or leave {knob.name} at its default {knob.default}"
            )
