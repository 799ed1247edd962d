"""Worker processes on this machine, talking over loopback."""

import signal

import psutil

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.launch.base import LAUNCHERS, DeviceSlot, Launcher, OnExit, WorkerAddress
from paceline.runtime.launch.zygote_process import ZygoteProcess

MAX_WORKERS = 64


@LAUNCHERS.register
class Local(Launcher):
    """`local:N`: N processes that share this machine's cores evenly."""

    name = "local"
    # Its cores are shared with whatever else runs, and it is measured in less than a second.
    keeps_profile = False

    def __init__(self, argument: str) -> None:
        if not argument.isdigit() or not 1 <= int(argument) <= MAX_WORKERS:
            raise InvalidRequest(f"cluster local:{argument} must name 1 to {MAX_WORKERS} workers; for example local:4")
        self._size = int(argument)
        self._zygote: ZygoteProcess | None = None

    @property
    def reference(self) -> str:
        """`local:N`."""
        return f"local:{self._size}"

    @property
    def slots(self) -> tuple[DeviceSlot, ...]:
        """N devices of the one node `localhost`."""
        return tuple(
            DeviceSlot(name=f"localhost/cpu{index}", node="localhost", pool="localhost") for index in range(self._size)
        )

    async def start(self, on_exit: OnExit) -> None:
        """Start the zygote and wait until it has imported everything."""
        self._zygote = ZygoteProcess(
            interface="lo",
            threads=max(1, (psutil.cpu_count() or 1) // self._size),
            on_exit=lambda device, incarnation: on_exit(device, incarnation, ""),
        )
        await self._zygote.start()

    async def launch(self, worker: WorkerAddress) -> None:
        """Ask the zygote for a fork."""
        assert self._zygote is not None
        await self._zygote.launch(worker)

    def kill(self, device: int, incarnation: int) -> None:
        """Through the zygote."""
        assert self._zygote is not None
        self._zygote.signal(device, incarnation, signal.SIGKILL)

    async def close(self) -> None:
        """End the zygote, and with it the workers."""
        if self._zygote is not None:
            await self._zygote.close()
