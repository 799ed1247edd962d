"""The server's end of a zygote: asks it for forks and signals, and hears of exits."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paceline.runtime.errors import WorkerFailure
from paceline.runtime.launch.base import WorkerAddress


class ZygoteProcess:
    """One zygote at a time; another is started for the next launch if somebody has killed it."""

    def __init__(self, *, interface: str, threads: int, on_exit: Callable[[int, int], None]) -> None:
        """`on_exit` is called with device and incarnation when a worker has ended."""
        self._interface = interface
        self._threads = threads
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._running: set[tuple[int, int]] = set()

    @property
    def running(self) -> tuple[tuple[int, int], ...]:
        """Device and incarnation of all workers that have been launched and have not ended."""
        return tuple(self._running)

    async def start(self) -> None:
        """Start the zygote and wait until it has imported everything. Raises WorkerFailure."""
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
                "GLOO_SOCKET_IFNAME": self._interface,
                "OMP_NUM_THREADS": str(self._threads),
                # What the server can import, above all the operator's workloads, its workers can import too.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise WorkerFailure("the worker launcher ended while starting; its error is on stderr")
        self._reader = asyncio.create_task(self._read_exits(self._process.stdout))

    async def _read_exits(self, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            self._exited(*json.loads(line)["exited"])
        # The zygote has ended, and its workers with it.
        for device, incarnation in self.running:
            self._exited(device, incarnation)

    def _exited(self, device: int, incarnation: int) -> None:
        self._running.discard((device, incarnation))
        self._on_exit(device, incarnation)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # A zygote that is ending takes its workers with it, whatever else is asked of them.
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def launch(self, worker: WorkerAddress, *, namespace: str = "", cgroups: Sequence[str] = ()) -> None:
        """Fork a worker, into the network namespace at a path and by way of members files into cgroups."""
        if self._reader is None or self._reader.done():
            await self.start()
        self._running.add((worker.device, worker.incarnation))
        place = {"namespace": namespace, "cgroups": list(cgroups), "threads": self._threads}
        self._send({"launch": {"worker": dataclasses.asdict(worker), **place}})

    def signal(self, device: int, incarnation: int, signum: signal.Signals) -> None:
        """Ask the zygote, which alone knows whether the pid still is that worker."""
        self._send({"signal": [device, incarnation, signum]})

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
