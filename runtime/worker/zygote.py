"""A process that has imported everything a worker needs and forks workers on demand.

Importing torch takes seconds, and the first DistributedDataParallel in a process some seconds more. The zygote pays
this once, so a replacement worker is there in milliseconds. It never runs an operation itself: a fork of a process
with running threads would be unsafe.

It reads one JSON object per line from stdin (`launch`, or `signal`) and writes one per line to stdout (`exited`). When
stdin closes, because its server ended in any way at all, it kills its workers and exits; they also die with it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from paceline.runtime.lab.namespace import enter

PR_SET_PDEATHSIG = 1


def _import_everything() -> None:
    # The first DistributedDataParallel in a process imports torch._dynamo.
    for module in ("torch._dynamo", "paceline.runtime.worker.main"):
        importlib.import_module(module)


def _run_child(request: dict[str, Any], zygote: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ctrl-C reaches the whole terminal group; the server decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    if request["namespace"]:
        enter(request["namespace"])
    for members in request["cgroups"]:
        with open(members, "w") as file:
            file.write("0")
    from paceline.runtime.launch.base import WorkerAddress
    from paceline.runtime.worker.main import run_worker

    run_worker(WorkerAddress(**request["worker"]), threads=request["threads"])


def main() -> None:
    """Serve requests until stdin closes."""
    _import_everything()
    waker, wakened = socket.socketpair()
    waker.setblocking(False)
    wakened.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakened, selectors.EVENT_READ)
    workers: dict[int, tuple[int, int]] = {}
    # Collecting garbage in a worker would walk, and so copy, everything that was imported here.
    gc.collect()
    gc.freeze()
    zygote = os.getpid()
    buffered = b""
    _say({"ready": True})
    while True:
        for key, _ in selector.select():
            if key.fileobj is wakened:
                wakened.recv(4096)
                _reap(workers)
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                signal.set_wakeup_fd(-1)
                for pid in workers:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "signal" in request:
                    _signal(workers, *request["signal"])
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    status = 1
                    try:
                        _run_child(request["launch"], zygote)
                        status = 0
                    except BaseException:
                        import traceback

                        traceback.print_exc()
                    finally:
                        os._exit(status)
                worker = request["launch"]["worker"]
                workers[pid] = (worker["device"], worker["incarnation"])


def _signal(workers: dict[int, tuple[int, int]], device: int, incarnation: int, signum: int) -> None:
    for pid, worker in workers.items():
        if worker == (device, incarnation):
            os.kill(pid, signum)


def _reap(workers: dict[int, tuple[int, int]]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say({"exited": workers.pop(pid)})


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
