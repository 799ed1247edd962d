"""Network namespaces, entered by one thread at a time."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

from pyroute2 import netns

CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(path: str) -> None:
    """Move the calling thread into the namespace at a path, for good. `ip netns exec` would also remount /sys, which
    hides the cgroup tree."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, CLONE_NEWNET), f"setns {path}")
    finally:
        os.close(descriptor)


def path_of(name: str) -> str:
    """Where a named namespace is found."""
    return f"{netns.NETNS_RUN_DIR}/{name}"


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _check(_libc.setns(home, CLONE_NEWNET), "setns home")
        os.close(home)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Be in a named namespace. Sockets opened there stay there; threads started there would, too."""
    with _returning():
        enter(path_of(name))
        yield


def create(name: str) -> None:
    """Make a named namespace. Raises OSError."""
    with _returning():
        # pyroute2 would fork, which a process with threads must not.
        _check(_libc.unshare(CLONE_NEWNET), "unshare")
        netns.attach(name, threading.get_native_id())
