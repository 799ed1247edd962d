"""Launchers: how worker processes come to be. One file per launcher."""

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.launch.base import LAUNCHERS, Launcher

LAUNCHERS.load()


def create(cluster: str) -> Launcher:
    """The launcher of a reference such as `local:4`. Raises UnknownName or InvalidRequest."""
    name, _, argument = cluster.partition(":")
    if not argument:
        raise InvalidRequest(f"cluster {cluster!r} must be LAUNCHER:WHAT; for example local:4")
    return LAUNCHERS.get(name)(argument)
