"""Worker processes in a lab: behind shaped links, under CPU quotas and memory limits."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from paceline.runtime.lab import file, namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.changes import ChangeState, parse_changes
from paceline.runtime.lab.network import DATA_INTERFACE
from paceline.runtime.launch.base import LAUNCHERS, DeviceSlot, Launcher, OnExit, WorkerAddress
from paceline.runtime.launch.zygote_process import ZygoteProcess


@LAUNCHERS.register
class Lab(Launcher):
    """`lab:FILE` or `lab:EXAMPLE`: one process per device of a cluster file, which is built on this machine."""

    name = "lab"

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._file = file.load(argument)
        self._lab: BuiltLab | None = None
        self._zygote: ZygoteProcess | None = None
        self._oom_kills: dict[tuple[int, int], int] = {}
        # One thread, so that a lab is never removed or restored while it is being built or changed.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="lab")

    @property
    def reference(self) -> str:
        """`lab:ARGUMENT`."""
        return f"lab:{self._argument}"

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """The devices of the file. Each has cores of its own, as much as its speed says."""
        return tuple(
            DeviceSlot(name=name, node=node, pool=name, memory=device.memory)
            for name, node, device in self._file.devices
        )

    @property
    def fingerprint(self) -> str:
        """The reference, and what the file says."""
        return f"{self.reference} {self._file.model_dump_json()}"

    @property
    def host(self) -> str:
        """This machine on the management network."""
        assert self._lab is not None, "the lab is not built yet"
        return self._lab.network.host

    async def start(self, on_exit: OnExit) -> None:
        """Build the lab and start the zygote. Raises InvalidRequest where none can be built."""
        self._lab = BuiltLab(self._file)
        await self._build(self._lab.build)

        def exited(device: int, incarnation: int) -> None:
            before = self._oom_kills.pop((device, incarnation))
            on_exit(device, incarnation, "oom" if self._count_oom_kills(device) > before else "")

        self._zygote = ZygoteProcess(interface=DATA_INTERFACE, threads=1, on_exit=exited)
        await self._zygote.start()

    async def _build(self, act: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._builder, act)

    def _count_oom_kills(self, device: int) -> int:
        assert self._lab is not None
        return self._lab.oom_kills(self.slots[device].name)

    async def launch(self, worker: WorkerAddress) -> None:
        """Ask the zygote for a fork into the device's node and cgroups."""
        assert self._lab is not None
        assert self._zygote is not None
        slot = self.slots[worker.device]
        self._oom_kills[worker.device, worker.incarnation] = self._count_oom_kills(worker.device)
        await self._zygote.launch(
            worker,
            namespace=namespace.path_of(self._lab.network.namespace(slot.node)),
            cgroups=self._lab.members_files(slot.name),
        )

    def kill(self, device: int, incarnation: int) -> None:
        """Through the zygote."""
        assert self._zygote is not None
        self._zygote.signal(device, incarnation, signal.SIGKILL)

    def check_changes(self, changes: Sequence[str]) -> None:
        """Raise InvalidRequest or UnknownName unless all can be made."""
        parse_changes(self._file, changes)

    async def change(self, changes: Sequence[str]) -> None:
        """Make the changes, one after the other."""
        assert self._lab is not None
        for change in parse_changes(self._file, changes):
            if isinstance(change, ChangeState):
                self._signal(change.signum, change.node)
            else:
                await self._build(partial(self._lab.change, change))

    def _signal(self, signum: signal.Signals, *nodes: str) -> None:
        assert self._zygote is not None
        for device, incarnation in self._zygote.running:
            if self.slots[device].node in nodes:
                self._zygote.signal(device, incarnation, signum)

    async def restore(self) -> None:
        """Give every link and device what the file says; frozen workers go on."""
        assert self._lab is not None
        await self._build(self._lab.restore)
        self._signal(signal.SIGCONT, *(node.name for node in self._file.nodes))

    async def close(self) -> None:
        """End the workers and remove the lab."""
        if self._zygote is not None:
            await self._zygote.close()
        if self._lab is not None:
            await self._build(self._lab.destroy)
        self._builder.shutdown(wait=False)
