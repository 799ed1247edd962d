"""What a launcher is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.runtime.errors import InvalidRequest
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
    memory: int | None = None
    """What its worker may allocate before it is killed, B; None where all share the machine's."""


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


OnExit = Callable[[int, int, str], None]
"""Called with device, incarnation and cause when a worker process has ended. The cause is a failure label where the
launcher knows better than that the worker is lost (`oom`), else empty."""


class Launcher(ABC):
    """Starts and kills worker processes. The constructor parses and validates the text after the colon."""

    name: ClassVar[str]
    keeps_profile: ClassVar[bool] = True
    """Whether what a probe measured still holds at the next start, as long as the fingerprint is the same."""

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

    @property
    def fingerprint(self) -> str:
        """Text that differs between clusters of which a probe could measure something else."""
        return f"{self.reference} {self.slots}"

    @property
    def host(self) -> str:
        """Address of this machine under which workers reach their server, once started."""
        return "127.0.0.1"

    @abstractmethod
    async def start(self, on_exit: OnExit) -> None:
        """Prepare for launching. `on_exit` is called from the running event loop."""

    @abstractmethod
    async def launch(self, worker: WorkerAddress) -> None:
        """Start a worker process."""

    @abstractmethod
    def kill(self, device: int, incarnation: int) -> None:
        """SIGKILL a worker. Nothing happens if it has ended already."""

    def check_changes(self, changes: Sequence[str]) -> None:
        """Raise InvalidRequest unless the cluster can be changed like this; each is `TARGET.SETTING=VALUE`."""
        if changes:
            raise InvalidRequest(f"cluster {self.reference} is what it is; only a lab can be changed: lab:two-racks")

    async def change(self, changes: Sequence[str]) -> None:
        """Make changes that `check_changes` has passed, whatever the workers are doing."""

    async def restore(self) -> None:
        """Undo all changes."""

    @abstractmethod
    async def close(self) -> None:
        """Kill all workers and wait until they are gone."""


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", package="paceline.runtime.launch", entry_point_group="paceline.launchers"
)
