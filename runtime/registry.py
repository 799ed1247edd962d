"""Plug-ins: one registry per kind, one file per plug-in, one decorator to register it.

A kind (sync mode, codec, mapper, batch share, precision recipe, launcher, workload) owns a folder. The folder's
`__init__` creates the `Registry` and calls `load`, which imports every sibling file and every installed entry point
of the group, so adding a plug-in touches no other file.
"""

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar

from paceline.runtime.errors import UnknownName


class Named(Protocol):
    """What every plug-in class carries: the name under which users and the wire refer to it."""

    name: str


P = TypeVar("P", bound=type[Any])


class Registry(Generic[P]):
    """The plug-ins of one kind, by name."""

    def __init__(self, kind: str, *, package: str, entry_point_group: str) -> None:
        self.kind = kind
        self._package = package
        self._group = entry_point_group
        self._plugins: dict[str, P] = {}

    def register(self, plugin: P) -> P:
        """Class decorator. Raises ValueError when the name is taken by another class."""
        known = self._plugins.setdefault(plugin.name, plugin)
        if known is not plugin:
            raise ValueError(f"{self.kind} {plugin.name!r} is already registered by {known.__module__}")
        return plugin

    def load(self) -> None:
        """Import the folder's plug-in files and the third-party entry points of the group."""
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        for entry_point in entry_points(group=self._group):
            self.register(entry_point.load())

    def names(self) -> tuple[str, ...]:
        """Registered names, sorted, so that everything derived from them is the same on every machine."""
        return tuple(sorted(self._plugins))

    def get(self, name: str) -> P:
        """Return the plug-in class. Raises UnknownName with the nearest registered name."""
        try:
            return self._plugins[name]
        except KeyError:
            raise UnknownName(self.kind, name, self._plugins) from None
