"""The worker's end of the control stream."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grpc
import psutil

from paceline.proto.paceline.v1 import control_pb2, control_pb2_grpc
from paceline.runtime.convert import to_message
from paceline.runtime.launch.base import WorkerAddress
from paceline.runtime.measure import StepReport
from paceline.runtime.rpc import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from paceline.runtime.worker.gate import StepGate

HEARTBEAT_SECONDS = 0.25


class ControlLink:
    """Sends answers and heartbeats, receives commands.

    Commands that concern a running training loop act on the gate at once, in the receiving thread; all others wait
    in `commands` for the main thread. The end of the stream is the end of the process, whatever it is doing.
    """

    def __init__(
        self, address: WorkerAddress, gate: "StepGate", *, steps_done: Callable[[], int], sever: Callable[[], None]
    ) -> None:
        self.commands: queue.SimpleQueue[control_pb2.Command] = queue.SimpleQueue()
        self._gate = gate
        self._steps_done = steps_done
        self._sever = sever
        self._outgoing: queue.SimpleQueue[control_pb2.WorkerMessage] = queue.SimpleQueue()
        self._reports: list[control_pb2.StepReport] = []
        self._reports_lock = threading.Lock()
        self._process = psutil.Process()
        hello = control_pb2.Hello(
            device=address.device,
            token=address.token,
            pid=os.getpid(),
            incarnation=address.incarnation,
        )
        self._outgoing.put(control_pb2.WorkerMessage(hello=hello))
        channel = grpc.insecure_channel(address.control, options=CHANNEL_OPTIONS)
        self._stream = control_pb2_grpc.ControlStub(channel).Attach(self._send())
        threading.Thread(target=self._receive, daemon=True, name="control").start()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _send(self) -> Iterator[control_pb2.WorkerMessage]:
        while True:
            yield self._outgoing.get()

    def _receive(self) -> None:
        try:
            for command in self._stream:
                self._dispatch(command)
        except grpc.RpcError:
            pass
        finally:
            os._exit(0)

    def _dispatch(self, command: control_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "hold":
                held = control_pb2.WorkerMessage.Held(next_step=self._gate.hold())
                self.answer(command, held=held)
            case "run_until":
                self._gate.run_until(command.run_until.step)
                self.answer(command, held=control_pb2.WorkerMessage.Held(next_step=command.run_until.step))
            case "run":
                # Opened here, not by the main thread, so that a hold sent right behind it is not lost.
                self._gate.open(self._steps_done(), command.run.until_step)
                self.commands.put(command)
            case "abort":
                self._gate.close()
                self._sever()
                self.commands.put(command)
            case "shutdown":
                os._exit(0)
            case _:
                self.commands.put(command)

    def _beat(self) -> None:
        ticks = threading.Event()
        while not ticks.wait(HEARTBEAT_SECONDS):
            self.flush()

    def report(self, report: StepReport) -> None:
        """Queue a step's report for the next heartbeat."""
        message = to_message(report, control_pb2.StepReport)
        with self._reports_lock:
            self._reports.append(message)

    def flush(self) -> None:
        """Send a heartbeat with all queued reports now."""
        with self._reports_lock:
            reports, self._reports = self._reports, []
            heartbeat = control_pb2.WorkerMessage.Heartbeat(
                resident_bytes=self._process.memory_info().rss, steps=reports
            )
            self._outgoing.put(control_pb2.WorkerMessage(heartbeat=heartbeat))

    def answer(self, command: control_pb2.Command, **message: object) -> None:
        """Answer a command with one of the WorkerMessage kinds."""
        self._outgoing.put(control_pb2.WorkerMessage(command_id=command.command_id, **message))  # type: ignore[arg-type]
