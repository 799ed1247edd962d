"""Workloads: what can be trained. One file per workload; operators add their own by `module:Class`."""

import importlib
from functools import cache

from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.workloads.base import WORKLOADS, Workload

WORKLOADS.load()


def references() -> tuple[str, ...]:
    """Every name a client may use: `name` for the first variant, `name/variant` for each."""
    found = []
    for name in WORKLOADS.names():
        variants = list(WORKLOADS.get(name).variants)
        found += [name, *(f"{name}/{variant}" for variant in variants if variant)]
    return tuple(found)


@cache
def create(reference: str) -> Workload:
    """The workload of a reference, made once per process. Raises UnknownName with the nearest reference."""
    name, _, variant = reference.partition("/")
    if reference not in references():
        raise UnknownName("workload", reference, references())
    plugin = WORKLOADS.get(name)
    chosen = variant or next(iter(plugin.variants))
    return plugin(**plugin.variants[chosen])


def register_class(path: str) -> None:
    """Register the operator's `module:Class`.

    Raises InvalidRequest when it is no Workload, has no variant, or its name is taken.
    """
    module_name, _, class_name = path.partition(":")
    try:
        plugin = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # importing runs the operator's code
        raise InvalidRequest(f"workload {path!r} cannot be imported ({error}); write it module:Class") from error
    if not (isinstance(plugin, type) and issubclass(plugin, Workload)):
        raise InvalidRequest(f"workload {path!r} is not a subclass of paceline.runtime.workloads.base.Workload")
    if not plugin.variants:
        raise InvalidRequest(
            f'workload {path!r} needs at least one variant; leave `variants` out, or write {{"": {{}}}}'
        )
    try:
        WORKLOADS.register(plugin)
    except ValueError as taken:
        raise InvalidRequest(f"workload {path!r}: {taken}; give it another name") from taken
