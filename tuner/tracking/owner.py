"""Whose run it is: tags that name the process behind a run, and whether that process is still there."""

import socket
from collections.abc import Mapping

import psutil

HOST = "paceline.host"
PID = "paceline.pid"
STARTED = "paceline.started"

# A start time is counted from the boot time, which is known in whole seconds and moves when the clock is set.
_START_TOLERANCE_SECONDS = 2.0


def owner_tags() -> dict[str, str]:
    """Host, process id and start time (s since the epoch) of this process: together they are never reused."""
    process = psutil.Process()
    return {HOST: socket.gethostname(), PID: str(process.pid), STARTED: f"{process.create_time():.2f}"}


def owner_is_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process that the tags of a run of this host name has ended, by whatever signal."""
    try:
        process = psutil.Process(int(tags[PID]))
        started = process.create_time()
        zombie = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    return zombie or abs(started - float(tags[STARTED])) > _START_TOLERANCE_SECONDS
