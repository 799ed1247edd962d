"""Changes of a lab while it runs, `TARGET.SETTING=VALUE`.

| target | setting | value |
| --- | --- | --- |
| node | `link`, `link.up`, `link.down` | a rate such as `50 Mbit/s` |
| node | `speed` | CPU cores of each of its devices |
| node | `state` | `killed`, `frozen`, `running` |
| node, rack | `network` | `cut`, `up` |
| rack | `uplink`, `uplink.up`, `uplink.down` | a rate |
| device | `speed` | CPU cores |
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.lab.file import LabFile, Rates, check_speeds
from paceline.runtime.lab.units import parse_rate, parse_speed

STATES = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "running": signal.SIGCONT}
"""State of a node -> what its workers are sent."""
NETWORKS = {"cut": False, "up": True}
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)
class ChangeRate:
    """A link carries more or less, in one direction or both."""

    wire: str
    """Node or rack at its lower end."""
    directions: tuple[str, ...]
    """`up`, `down` or both."""
    rate: float
    """B/s."""


@dataclass(frozen=True, kw_only=True)
class ChangeSpeed:
    """Devices become faster or slower."""

    devices: tuple[str, ...]
    """Their names."""
    speed: float
    """CPU cores of each."""


@dataclass(frozen=True, kw_only=True)
class ChangeState:
    """The workers of a node die, freeze or go on."""

    node: str
    """Its name."""
    signum: signal.Signals
    """What they are sent."""


@dataclass(frozen=True, kw_only=True)
class ChangeNetwork:
    """A node or rack is cut off from the others, or joined to them again."""

    wire: str
    """Its name."""
    connected: bool
    """Whether its traffic passes."""


Change = ChangeRate | ChangeSpeed | ChangeState | ChangeNetwork


def parse_changes(file: LabFile, changes: Sequence[str]) -> tuple[Change, ...]:
    """Read changes that are made one after the other. Raises InvalidRequest or UnknownName if any cannot be made."""
    speeds = dict(file.speeds)
    parsed = []
    for text in changes:
        try:
            change = _parse(file, text)
            if isinstance(change, ChangeSpeed):
                speeds.update(dict.fromkeys(change.devices, change.speed))
                check_speeds(list(speeds.values()))
        except ValueError as error:
            raise InvalidRequest(f"change {text!r}: {error}") from None
        parsed.append(change)
    return tuple(parsed)


def _parse(file: LabFile, text: str) -> Change:
    place, equals, value = text.partition("=")
    target, dot, setting = place.strip().partition(".")
    if not (equals and dot):
        raise ValueError("write TARGET.SETTING=VALUE; for example e0.link=50 Mbit/s")
    settings = _settings(file)
    if target not in settings:
        raise UnknownName("node, rack or device", target, settings)
    if setting not in settings[target]:
        raise UnknownName(f"setting of {target}", setting, settings[target])
    return settings[target][setting](value.strip())


def _settings(file: LabFile) -> Mapping[str, Mapping[str, Callable[[str], Change]]]:
    nodes = {node.name for node in file.nodes}
    targets: dict[str, dict[str, Callable[[str], Change]]] = {}
    for wire in file.wires:
        link = "link" if wire in nodes else "uplink"
        targets[wire] = {
            link: _rate(wire, *Rates.model_fields),
            **{f"{link}.{direction}": _rate(wire, direction) for direction in Rates.model_fields},
            "network": _network(wire),
        }
    for node in nodes:
        devices = tuple(name for name, of, _ in file.devices if of == node)
        targets[node] |= {"speed": _speed(*devices), "state": _state(node)}
        targets |= {name: {"speed": _speed(name)} for name in devices}
    return targets


def _rate(wire: str, *directions: str) -> Callable[[str], Change]:
    return lambda value: ChangeRate(wire=wire, directions=directions, rate=parse_rate(value))


def _network(wire: str) -> Callable[[str], Change]:
    return lambda value: ChangeNetwork(wire=wire, connected=_one_of(NETWORKS, "network", value))


def _speed(*devices: str) -> Callable[[str], Change]:
    return lambda value: ChangeSpeed(devices=devices, speed=parse_speed(value))


def _state(node: str) -> Callable[[str], Change]:
    return lambda value: ChangeState(node=node, signum=_one_of(STATES, "state", value))


def _one_of(options: Mapping[str, V], kind: str, value: str) -> V:
    if value not in options:
        raise UnknownName(kind, value, options)
    return options[value]
