"""Worker processes on this machine, talking over loopback."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from typing import Any

import psutil

from paceline.runtime.errors import InvalidRequest, WorkerFailure
from paceline.runtime.launch.base import LAUNCHERS, DeviceSlot, Launcher, OnExit, WorkerAddress

MAX_WORKERS = 64


@LAUNCHERS.register
class Local(Launcher):
    """`local:N`: N processes that share this machine's cores evenly."""

    name = "local"

    def __init__(self, argument: str) -> None:
        if not argument.isdigit() or not 1 <= int(argument) <= MAX_WORKERS:
            raise InvalidRequest(f"cluster local:{argument} must name 1 to {MAX_WORKERS} workers; for example local:4")
        self._size = int(argument)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._on_exit: OnExit | None = None
        self._running: set[tuple[int, int]] = set()

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
        self._on_exit = on_exit
        await self._start_zygote()

    async def _start_zygote(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.runtime.worker.zygote",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={
                # A rank that loses its peers warns with a stack trace in C++, and then goes on.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": str(self._threads),
                # What the server can import, above all the operator's workloads, its workers can import too.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise WorkerFailure("the worker launcher ended while starting; its error is on stderr")
        self._reader = asyncio.create_task(self._read_exits(self._process.stdout))

    @property
    def _threads(self) -> int:
        return max(1, (psutil.cpu_count() or 1) // self._size)

    async def _read_exits(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            self._exited(*json.loads(line)["exited"])
        # The zygote has ended, and its workers with it.
        for device, incarnation in tuple(self._running):
            self._exited(device, incarnation)

    def _exited(self, device: int, incarnation: int) -> None:
        assert self._on_exit is not None
        self._running.discard((device, incarnation))
        self._on_exit(device, incarnation, "")

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def launch(self, worker: WorkerAddress) -> None:
        """Ask the zygote for a fork; start another zygote if somebody has killed it."""
        if self._reader is None or self._reader.done():
            await self._start_zygote()
        self._running.add((worker.device, worker.incarnation))
        self._send({"launch": {**dataclasses.asdict(worker), "threads": self._threads}})

    def kill(self, device: int, incarnation: int) -> None:
        """Ask the zygote, which alone knows whether the pid still is that worker."""
        self._send({"kill": [device, incarnation]})

    async def close(self) -> None:
        """Close the zygote's stdin: it kills its workers and ends."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._process = None
