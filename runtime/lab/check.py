"""Measures a lab that was built against its file: every link in each direction, every device."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.runtime.errors import WorkerFailure
from paceline.runtime.lab import namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.file import LabFile
from paceline.runtime.lab.network import MIN_BURST, QUEUE_SECONDS, Hop, Network

TOLERANCE = 0.10
"""Relative deviation that still passes."""
WARM_UP_SECONDS = 0.5
"""Until the buckets are drained and TCP has found its pace."""
MEASURE_SECONDS = 1.2
RATE_AT_ONCE = 150e6
"""B/s that are sent at one time, so that links and not cores are measured."""
SO_SNDBUFFORCE = 32
"""From Linux's asm-generic/socket.h."""
SPIN_SECONDS = 1.5
SPIN = Path(__file__).with_name("spin.py")
TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class LinkCheck:
    """One direction of a link."""

    source: str
    """Node, rack or core switch that sends."""
    target: str
    """The one that receives."""
    configured: float
    """B/s."""
    measured: float
    """Of one TCP connection, B/s."""


@dataclass(frozen=True, kw_only=True)
class DeviceCheck:
    """One device, while all compute."""

    node: str
    """Name of its node."""
    device: str
    """Its own name."""
    configured: float
    """CPU cores."""
    measured: float
    """CPU cores that a busy process got."""


def deviation(check: LinkCheck | DeviceCheck) -> float:
    """Relative: -0.1 is a tenth too little."""
    return check.measured / check.configured - 1


def check_lab(file: LabFile) -> tuple[list[LinkCheck], list[DeviceCheck]]:
    """Build a lab, measure it and remove it. Takes seconds. Raises InvalidRequest or WorkerFailure."""
    lab = BuiltLab(file)
    try:
        lab.build()
        return measure_links(lab.network), measure_devices(lab, file)
    finally:
        lab.destroy()


def measure_links(network: Network, hops: Sequence[Hop] | None = None) -> list[LinkCheck]:
    """What one TCP connection reaches over each hop alone, all hops if none are given.

    Those that are off are measured once more: the machine may have stalled.
    """
    hops = network.hops if hops is None else hops
    checks = {hop: LinkCheck(source=hop.source, target=hop.target, configured=hop.rate, measured=0.0) for hop in hops}
    for _ in range(2):
        for together in _rounds([hop for hop, check in checks.items() if abs(deviation(check)) > TOLERANCE]):
            with ThreadPoolExecutor(len(together)) as pool:
                for hop, measured in zip(together, pool.map(partial(_receive_rate, network), together), strict=True):
                    checks[hop] = replace(checks[hop], measured=measured)
    return list(checks.values())


def _rounds(hops: Sequence[Hop]) -> list[list[Hop]]:
    rounds: list[list[Hop]] = []
    for hop in hops:
        for together in rounds:
            fits = sum(other.rate for other in together) + hop.rate <= RATE_AT_ONCE
            # What flows back, if only acknowledgements, takes from the other direction.
            if fits and not any((other.target, other.source) == (hop.source, hop.target) for other in together):
                together.append(hop)
                break
        else:
            rounds.append([hop])
    return rounds


@contextlib.contextmanager
def _connection(network: Network, hop: Hop) -> Iterator[tuple[socket.socket, socket.socket]]:
    with namespace.inside(network.namespace(hop.target)):
        server = socket.create_server((network.address(hop.target), 0))
    with namespace.inside(network.namespace(hop.source)):
        sender = socket.socket()
    with server, sender:
        sender.settimeout(TIMEOUT_SECONDS)
        # With more on its way than the queue takes, TCP spends the first seconds on finding and sending again what was
        # dropped, and the receiver gets that in lumps.
        sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, max(MIN_BURST, int(hop.rate * QUEUE_SECONDS / 2)))
        sender.connect(server.getsockname())
        receiver, _ = server.accept()
        with receiver:
            for end in (sender, receiver):
                # Closing drops what is still queued, instead of sending it into the next measurement.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            receiver.settimeout(TIMEOUT_SECONDS)
            yield sender, receiver


def _receive_rate(network: Network, hop: Hop) -> float:
    with _connection(network, hop) as (sender, receiver):
        thread = threading.Thread(target=_send_forever, args=(sender,))
        thread.start()
        try:
            buffer = bytearray(2**18)
            began = now = time.monotonic()
            while now - began < WARM_UP_SECONDS:
                receiver.recv_into(buffer)
                now = time.monotonic()
            received, began = 0, now
            while now - began < MEASURE_SECONDS:
                received += receiver.recv_into(buffer)
                now = time.monotonic()
        finally:
            receiver.close()
            thread.join()
    return received / (now - began)


def _send_forever(sender: socket.socket) -> None:
    chunk = bytes(2**18)
    with contextlib.suppress(OSError):
        while True:
            sender.sendall(chunk)


def measure_devices(lab: BuiltLab, file: LabFile) -> list[DeviceCheck]:
    """How much each device computes while all do; once more if one is off. Raises WorkerFailure."""
    checks = _spin(lab, file)
    return _spin(lab, file) if any(abs(deviation(check)) > TOLERANCE for check in checks) else checks


def _spin(lab: BuiltLab, file: LabFile) -> list[DeviceCheck]:
    with contextlib.ExitStack() as stack:
        spinners = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-I", SPIN, *lab.members_files(name), str(SPIN_SECONDS)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in file.speeds
        ]
        for spinner in spinners:
            assert spinner.stdout is not None
            spinner.stdout.readline()
        # All have started, so none computes alone.
        for spinner in spinners:
            assert spinner.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                spinner.stdin.write("\n")
                spinner.stdin.flush()
        answers = [spinner.communicate()[0] for spinner in spinners]
    if not all(answers):
        raise WorkerFailure(f"lab {file.name}: a device's process ended before it had computed anything")
    return [
        DeviceCheck(node=node, device=name, configured=device.speed, measured=float(answer))
        for (name, node, device), answer in zip(file.devices, answers, strict=True)
    ]
