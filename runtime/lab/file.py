"""Cluster files: the nodes, racks, devices and links that a lab is to have.

```yaml
name: pair
racks:
  - {name: left, uplink: 100 Mbit/s}
  - {name: right, uplink: {up: 20 Mbit/s, down: 40 Mbit/s}}
nodes:
  - {name: a, rack: left, link: 400 Mbit/s, devices: [{speed: 0.5, memory: 512 MiB}]}
  - {name: b, rack: right, link: 400 Mbit/s, devices: [{speed: 0.5}]}
```

Devices are numbered in the order of the file. Latency is not shaped.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError, model_validator

from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.lab.units import parse_memory, parse_rate, parse_speed

EXAMPLES = Path(__file__).with_name("examples")
CORE = "core"
"""Name of the switch that joins the racks, and the nodes without one."""
MAX_DEVICES = 64

Name = Annotated[str, StringConstraints(strict=True, pattern=r"^[a-z0-9-]{1,20}$")]
Rate = Annotated[float, BeforeValidator(parse_rate)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rates(_Part):
    """What a link carries in each direction."""

    up: Rate
    """Towards the core switch, B/s."""
    down: Rate
    """Away from it, B/s."""


def _both_ways(value: object) -> object:
    return value if isinstance(value, dict | Rates) else {"up": value, "down": value}


EitherWay = Annotated[Rates, BeforeValidator(_both_ways)]
"""`400 Mbit/s`, or `{up: 20 Mbit/s, down: 40 Mbit/s}`."""


class DeviceEntry(_Part):
    """A place for one worker."""

    speed: Annotated[float, BeforeValidator(parse_speed)]
    """CPU cores, 0.01 or more."""
    memory: Annotated[int, BeforeValidator(parse_memory)] | None = None
    """Limit of what its worker may allocate, B; none if left out."""


class Rack(_Part):
    """Nodes behind one switch."""

    name: Name
    """Unique among nodes and racks."""
    uplink: EitherWay
    """From its switch to the core switch."""


class Node(_Part):
    """A network address of its own, with devices."""

    name: Name
    """Unique among nodes and racks."""
    rack: Name | None = None
    """Whose switch its link leads to; the core switch if left out."""
    link: EitherWay
    """From the node to that switch. Devices of one node reach each other without it."""
    devices: tuple[DeviceEntry, ...]
    """At least one."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A link of the tree whose root is the core switch."""

    child: str
    """Node or rack at its lower end, which names it."""
    parent: str
    """Rack or core switch at its upper end."""
    rates: Rates
    """What it carries."""


class LabFile(_Part):
    """A cluster to be built."""

    name: Name
    """For people."""
    racks: tuple[Rack, ...] = ()
    """Those that nodes name."""
    nodes: tuple[Node, ...]
    """In the order in which a scheduler would give them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        racks = [rack.name for rack in self.racks]
        names = Counter([CORE, *racks, *(node.name for node in self.nodes)])
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"name {twice[0]!r} must be given once; {CORE!r} is the core switch")
        for node in self.nodes:
            if node.rack is not None and node.rack not in racks:
                raise ValueError(f"node {node.name!r}: {UnknownName('rack', node.rack, racks)}")
            if not node.devices:
                raise ValueError(f"node {node.name!r} needs at least one device; for example devices: [{{speed: 0.2}}]")
        speeds = self.speeds
        if not 1 <= len(speeds) <= MAX_DEVICES:
            raise ValueError(f"{len(speeds)} devices in all; use 1 to {MAX_DEVICES}")
        check_speeds(list(speeds.values()))
        return self

    @property
    def speeds(self) -> dict[str, float]:
        """Device name -> CPU cores, by device index."""
        return {name: device.speed for name, _, device in self.devices}

    @property
    def devices(self) -> tuple[tuple[str, str, DeviceEntry], ...]:
        """Device name, node name and device, by device index."""
        return tuple(
            (f"{node.name}/cpu{index}", node.name, device)
            for node in self.nodes
            for index, device in enumerate(node.devices)
        )

    @property
    def wires(self) -> dict[str, Wire]:
        """All links, by the name of their child."""
        links = [(node.name, node.rack or CORE, node.link) for node in self.nodes]
        uplinks = [(rack.name, CORE, rack.uplink) for rack in self.racks]
        return {child: Wire(child=child, parent=parent, rates=rates) for child, parent, rates in [*links, *uplinks]}


def check_speeds(speeds: list[float]) -> None:
    """Raise ValueError unless this machine has so many cores."""
    cores = len(os.sched_getaffinity(0))
    # Speeds are decimal fractions, whose binary sum is off by a hair.
    if sum(speeds) > cores + 1e-9:
        raise ValueError(
            f"speeds add up to {sum(speeds):g} cores, and this machine has {cores}; scale them by "
            f"{cores / sum(speeds):.2g}"
        )


def examples() -> dict[str, str]:
    """Name of each example -> what it is, in one line."""
    return {
        path.stem: path.read_text().splitlines()[0].removeprefix("#").strip()
        for path in sorted(EXAMPLES.glob("*.yaml"))
    }


def find(reference: str) -> Path:
    """Path of an example, by its name, or of a file. Raises InvalidRequest or UnknownName."""
    if reference in examples():
        return EXAMPLES / f"{reference}.yaml"
    path = Path(reference)
    if path.is_file():
        return path
    if path.suffix or len(path.parts) != 1:
        raise InvalidRequest(f"no cluster file {reference!r}; examples: {', '.join(examples())}")
    raise UnknownName("lab cluster", reference, examples())


def load(reference: str) -> LabFile:
    """Read an example, by its name, or a file. Raises InvalidRequest or UnknownName."""
    path = find(reference)
    try:
        return LabFile.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        raise InvalidRequest(f"cluster file {path.name}: {_first_line(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cluster file {path.name} is not YAML: {' '.join(str(error).split())}") from None


def _first_line(error: ValidationError) -> str:
    # A misspelt setting also leaves the right one missing.
    first: Any = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[0]
    *parents, last = [str(part) for part in first["loc"]] or [""]
    if first["type"] == "extra_forbidden":
        known = {field for part in (LabFile, Rack, Node, DeviceEntry, Rates) for field in part.model_fields}
        return f"{'.'.join(parents) or 'top level'}: {UnknownName('setting', last, known)}"
    where = ".".join([*parents, last])
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] in ("value_error", "missing") else f", got {first['input']!r}"
    return f"{where}: {message}{given}" if where else f"{message}{given}"
