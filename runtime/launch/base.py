"""What a launcher is."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from paceline.runtime.registry import Registry


@dataclass(frozen=True, kw_only=True)
class DeviceSlot:
    """A place that a launcher can start a worker on."""

    name: str
    """Unique in the cluster."""
    node: str
    """Node it sits in."""
    pool: str
    """Devices of one pool take turns on the same cores, so they are equally fast whatever a short probe says."""


@dataclass(frozen=True, kw_only=True)
class WorkerAddress:
    """What a new worker needs to find its server."""

    device: int
    """Device index it is started on."""
    incarnation: int
    """Counts the workers started on this device; a late message of a dead one is told apart by it."""
    control: str
    """HOST:PORT of the control service."""
    token: str
    """Secret that it must present."""
    workloads: tuple[str, ...]
    """The operator's own workloads, `module:Class`, that it must register."""


OnExit = Callable[[int, int], None]
"""Called with device and incarnation when a worker process has ended, for whatever reason."""


class Launcher(ABC):
    """Starts and kills worker processes. The constructor parses and validates the text after the colon."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, argument: str) -> None:
        """Raises InvalidRequest for an argument that cannot work here, before anything starts."""

    @property
    @abstractmethod
    def reference(self) -> str:
        """How users name this cluster, e.g. `local:4`."""

    @property
    @abstractmethod
    def slots(self) -> tuple[DeviceSlot, ...]:
        """All devices, by device index."""

    @abstractmethod
    async def start(self, on_exit: OnExit) -> None:
        """Prepare for launching. `on_exit` is called from the running event loop."""

    @abstractmethod
    async def launch(self, worker: WorkerAddress) -> None:
        """Start a worker process."""

    @abstractmethod
    def kill(self, device: int, incarnation: int) -> None:
        """SIGKILL a worker. Nothing happens if it has ended already."""

    @abstractmethod
    async def close(self) -> None:
        """Kill all workers and wait until they are gone."""


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", package="paceline.runtime.launch", entry_point_group="paceline.launchers"
)
