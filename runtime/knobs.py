"""Derive the knob space from the registered plug-ins and their config dataclasses.

A plug-in's `Config` declares a knob as a field: `period: int = knob("sync.period", Number(...), default=8)` with a
docstring under it. The same field name may stand in several plug-ins of a kind; they then share the knob.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from paceline.runtime.domain.domains import Categorical, Domain, KnobValue, ValueRefused
from paceline.runtime.domain.knobs import Knob, KnobSpace, Requirement, Rule
from paceline.runtime.errors import IllegalStrategy
from paceline.runtime.registry import Registry


def knob(name: str, domain: Domain, *, default: KnobValue) -> Any:
    """Declare a config field that is the knob `name`."""
    return dataclasses.field(default=default, metadata={"knob": name, "domain": domain})


class DataclassInstance(Protocol):
    """Any dataclass instance."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class KnobConfig:
    """Base of a plug-in's config: validates every knob field against its domain."""

    def __post_init__(self: DataclassInstance) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                field.metadata["domain"].check(value)
            except ValueRefused as refused:
                raise IllegalStrategy(f"{field.metadata['knob']}={value}: {refused}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoKnobs(KnobConfig):
    """The config of a plug-in that has nothing to set."""


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and its bases, as one line each."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base) or not base.__annotations__:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


C = TypeVar("C")


def config_from(config: type[C], strategy: Mapping[str, KnobValue]) -> C:
    """Fill a plug-in's config from the strategy's knobs of the same names."""
    return config(
        **{field.name: strategy[field.metadata["knob"]] for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    )


def selector_knob(registry: Registry[Any], *, name: str, default: str, doc: str) -> Knob:
    """The knob that names the plug-in of a kind."""
    return Knob(name=name, doc=doc, domain=Categorical(choices=registry.names()), default=default)


def plugin_knobs(registry: Registry[Any], *, selector: str) -> list[Knob]:
    """The knobs declared by the configs of a kind's plug-ins, each in use with the plug-ins that declare it."""
    declared: dict[str, tuple[Knob, list[str]]] = {}
    for plugin_name in registry.names():
        config = registry.get(plugin_name).Config
        docs = field_docs(config)
        for field in dataclasses.fields(config):
            knob_name = field.metadata["knob"]
            found = Knob(
                name=knob_name,
                doc=docs[field.name],
                domain=field.metadata["domain"],
                default=typing.cast(KnobValue, field.default),
            )
            known, users = declared.setdefault(knob_name, (found, []))
            if (known.domain, known.default) != (found.domain, found.default):
                raise ValueError(f"{plugin_name} declares {knob_name} differently from {', '.join(users)}")
            users.append(plugin_name)
    return [
        dataclasses.replace(
            knob,
            requires=None if tuple(users) == registry.names() else Requirement(knob=selector, values=tuple(users)),
        )
        for knob, users in declared.values()
    ]


def plugin_rules(registry: Registry[Any]) -> tuple[Rule, ...]:
    """The rules that the plug-ins of a kind declare."""
    return tuple(dict.fromkeys(rule for name in registry.names() for rule in registry.get(name).rules))


@cache
def knob_space() -> KnobSpace:
    """The knob space of this process: derived once from the registries."""
    # The folders import this module for `knob`, so they can only be imported once it is complete.
    from paceline.runtime import compress, mapping, precision, sync

    knobs = [*sync.knobs(), *compress.knobs(), *mapping.knobs(), *precision.knobs()]
    rules = (*sync.rules(), *compress.rules(), *precision.rules())
    return KnobSpace(knobs=tuple(sorted(knobs, key=lambda knob: knob.name)), rules=rules)
