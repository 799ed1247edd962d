"""The warm workers of a runtime: launched, attached, watched, fenced and replaced."""

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from paceline.proto.paceline.v1 import control_pb2, control_pb2_grpc
from paceline.runtime.errors import WorkerFailure
from paceline.runtime.launch.base import Launcher, WorkerAddress
from paceline.runtime.rpc import SERVER_OPTIONS

ATTACH_SECONDS = 60.0
"""How long a launched worker may take to attach."""
SILENCE_SECONDS = 20.0
"""A worker without a heartbeat for so long is frozen or cut off: it is killed, so that its peers notice."""
WATCH_SECONDS = 1.0


class WorkerLost(Exception):
    """The worker process is gone."""


class WorkerError(Exception):
    """The worker could not do what it was asked; it lives."""

    def __init__(self, worker: "Worker", label: str, message: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.label = label


class Worker:
    """The server's view of one worker process."""

    def __init__(self, device: int, incarnation: int) -> None:
        self.device = device
        self.incarnation = incarnation
        self.attached = asyncio.Event()
        self.lost = asyncio.Event()
        self.outgoing: asyncio.Queue[control_pb2.Command] = asyncio.Queue()
        self.cause_of_loss = ""
        self.resident_bytes = 0
        self.last_seen = time.monotonic()
        self.on_reports: Callable[[Sequence[control_pb2.StepReport]], None] = lambda reports: None
        self._pending: dict[int, asyncio.Future[control_pb2.WorkerMessage]] = {}
        self._commands = 0

    def __repr__(self) -> str:
        return f"worker {self.device}.{self.incarnation}"

    async def call(self, **command: object) -> control_pb2.WorkerMessage:
        """Send a command and wait for its answer. Raises WorkerLost or WorkerError."""
        if self.lost.is_set():
            raise WorkerLost(f"{self} is gone")
        self._commands += 1
        number = self._commands
        answer: asyncio.Future[control_pb2.WorkerMessage] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        self.outgoing.put_nowait(control_pb2.Command(command_id=number, **command))  # type: ignore[arg-type]
        try:
            message = await answer
        finally:
            self._pending.pop(number, None)
        if message.WhichOneof("message") == "failed":
            raise WorkerError(self, message.failed.label, message.failed.message)
        return message

    def receive(self, message: control_pb2.WorkerMessage) -> None:
        """Take a message that the worker sent."""
        self.last_seen = time.monotonic()
        if message.WhichOneof("message") == "heartbeat":
            self.resident_bytes = message.heartbeat.resident_bytes
            if message.heartbeat.steps:
                self.on_reports(message.heartbeat.steps)
        elif (answer := self._pending.get(message.command_id)) and not answer.done():
            answer.set_result(message)

    def mark_lost(self, cause: str = "") -> None:
        """The process has ended: every open call fails, and nobody waits for it to attach."""
        self.cause_of_loss = self.cause_of_loss or cause
        self.lost.set()
        self.attached.set()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(WorkerLost(f"{self} is gone"))


async def call_all(workers: Sequence[Worker], **command: object) -> list[control_pb2.WorkerMessage]:
    """Send a command to all; their answers in order. The first failure is raised, the other answers are dropped."""
    calls = [asyncio.create_task(worker.call(**command)) for worker in workers]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class Fleet(control_pb2_grpc.ControlServicer):
    """One worker per device, and the control service they attach to."""

    def __init__(self, launcher: Launcher, *, workloads: tuple[str, ...]) -> None:
        self.launcher = launcher
        self._workloads = workloads
        self._token = secrets.token_hex(16)
        self._workers: dict[int, Worker] = {}
        self._incarnations = 0
        self._server: grpc.aio.Server | None = None
        self._address = ""
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the control service and all workers. Raises WorkerFailure."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        await self.launcher.start(self._on_exit)
        host = self.launcher.host
        self._address = f"{host}:{self._server.add_insecure_port(f'{host}:0')}"
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_silence())
        await self.complete(range(len(self.launcher.slots)))

    async def close(self) -> None:
        """Kill all workers and stop listening."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self.launcher.close()
        if self._server is not None:
            await self._server.stop(None)

    async def complete(self, devices: Sequence[int]) -> tuple[Worker, ...]:
        """A live, attached worker for each device, launching what is missing. Raises WorkerFailure."""
        for device in devices:
            if device not in self._workers or self._workers[device].lost.is_set():
                self._incarnations += 1
                worker = self._workers[device] = Worker(device, self._incarnations)
                await self.launcher.launch(
                    WorkerAddress(
                        device=device,
                        incarnation=worker.incarnation,
                        control=self._address,
                        token=self._token,
                        workloads=self._workloads,
                    )
                )
        workers = tuple(self._workers[device] for device in devices)
        for worker in workers:
            try:
                async with asyncio.timeout(ATTACH_SECONDS):
                    await worker.attached.wait()
            except TimeoutError:
                self.fence(worker)
                raise WorkerFailure(f"{worker} did not attach within {ATTACH_SECONDS:g} s") from None
        return workers

    @property
    def resident_bytes(self) -> int:
        """Largest resident set of a worker, B."""
        return max((worker.resident_bytes for worker in self._workers.values()), default=0)

    def fence(self, worker: Worker) -> None:
        """Kill a worker whose state is unknown, so that it can do nothing more and its peers notice."""
        self.launcher.kill(worker.device, worker.incarnation)

    def _on_exit(self, device: int, incarnation: int, cause: str) -> None:
        worker = self._workers.get(device)
        if worker is not None and worker.incarnation == incarnation:
            worker.mark_lost(cause)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for worker in self._workers.values():
                silent = time.monotonic() - worker.last_seen
                if worker.attached.is_set() and not worker.lost.is_set() and silent > SILENCE_SECONDS:
                    self.fence(worker)

    async def Attach(
        self,
        request_iterator: AsyncIterator[control_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[control_pb2.WorkerMessage, control_pb2.Command],
    ) -> AsyncIterator[control_pb2.Command]:
        """Serve one worker's stream."""
        hello = (await anext(aiter(request_iterator))).hello
        worker = self._workers.get(hello.device)
        known = worker is not None and worker.incarnation == hello.incarnation
        if worker is None or not known or not hmac.compare_digest(hello.token, self._token):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not a worker of this server")
            return
        worker.last_seen = time.monotonic()
        worker.attached.set()
        reader = asyncio.create_task(self._read(worker, request_iterator))
        try:
            while True:
                yield await worker.outgoing.get()
        finally:
            reader.cancel()

    async def _read(self, worker: Worker, messages: AsyncIterator[control_pb2.WorkerMessage]) -> None:
        try:
            async for message in messages:
                worker.receive(message)
        finally:
            # A worker cut off from its server is as good as dead, but only its exit makes it lost.
            self.fence(worker)
