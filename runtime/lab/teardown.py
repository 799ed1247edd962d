"""Removes labs: processes, namespaces, links and cgroups, found by the name of their owner and by nothing else."""

import contextlib
import os
import select
import signal
from collections.abc import Callable

from pyroute2 import IPRoute, netns
from pyroute2.netlink.exceptions import NetlinkError

from paceline.runtime.errors import WorkerFailure
from paceline.runtime.lab.cgroup import Cgroups
from paceline.runtime.lab.owner import owner_of

KILL_SECONDS = 5.0


def remove_labs(cgroups: Cgroups, whose: Callable[[str], bool]) -> None:
    """Remove all that belongs to the owners asked for. Raises WorkerFailure if a process cannot be killed."""
    for group in cgroups.owners():
        if owner_of(group) == group and whose(group):
            _kill(cgroups, group)
            cgroups.remove(group)
    for name in netns.listnetns():
        owner = owner_of(name)
        if owner and whose(owner):
            # Another lab that starts now may be removing the same one.
            with contextlib.suppress(FileNotFoundError):
                netns.remove(name)
    with IPRoute() as ip:
        for link in ip.get_links():
            alias = link.get_attr("IFLA_IFALIAS") or ""
            if owner_of(alias) == alias != "" and whose(alias):
                with contextlib.suppress(NetlinkError):
                    ip.link("del", index=link["index"])


def _kill(cgroups: Cgroups, owner: str) -> None:
    # Again, as one that was being killed may have forked.
    while pids := cgroups.processes(owner):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                _kill_and_wait(pid)


def _kill_and_wait(pid: int) -> None:
    # Waiting for the process itself would take its exit status away from whoever started it.
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        if not end.poll(1000 * KILL_SECONDS):
            raise WorkerFailure(f"process {pid} of a lab does not die within {KILL_SECONDS:g} s")
    finally:
        os.close(descriptor)
