"""A cluster file made real."""

import os
import sys

from pyroute2.netlink.exceptions import NetlinkError

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.lab.cgroup import find_cgroups
from paceline.runtime.lab.changes import ChangeNetwork, ChangeRate, ChangeSpeed
from paceline.runtime.lab.file import LabFile
from paceline.runtime.lab.network import Network
from paceline.runtime.lab.owner import is_dead, new_owner
from paceline.runtime.lab.teardown import remove_labs


class BuiltLab:
    """Namespaces, links and cgroups of one cluster file. Methods block, for less than a second."""

    def __init__(self, file: LabFile) -> None:
        """Raises InvalidRequest, before anything is made, where no lab can be built."""
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise InvalidRequest(
                "a lab makes network namespaces and cgroups, which takes root on Linux; "
                f"without, use local:{len(file.devices)}"
            )
        self._file = file
        self._owner = new_owner()
        self._cgroups = find_cgroups()
        self.network = Network(file, self._owner)

    def build(self) -> None:
        """Remove what crashed labs have left, and make everything. Raises InvalidRequest, and then leaves nothing."""
        try:
            remove_labs(self._cgroups, is_dead)
            self._cgroups.prepare(self._owner)
            for name, _, device in self._file.devices:
                self._cgroups.add(self._owner, name, speed=device.speed, memory=device.memory)
            self.network.build()
        except (OSError, NetlinkError) as error:
            self.destroy()
            raise InvalidRequest(
                f"cannot build lab {self._file.name} here: {error}; it needs network namespaces, bridges, the queueing "
                f"discipline tbf and cgroups; without, use local:{len(self._file.devices)}"
            ) from error

    def destroy(self) -> None:
        """Kill everything inside and remove it."""
        remove_labs(self._cgroups, self._owner.__eq__)

    def members_files(self, device: str) -> list[str]:
        """Files that a process writes 0 into to run at the device's speed, within its memory."""
        return self._cgroups.members_files(self._owner, device)

    def oom_kills(self, device: str) -> int:
        """How often a process of the device was killed because its memory was used up."""
        return self._cgroups.oom_kills(self._owner, device)

    def change(self, change: ChangeRate | ChangeSpeed | ChangeNetwork) -> None:
        """Make a change, while traffic flows or not."""
        match change:
            case ChangeRate():
                for direction in change.directions:
                    self.network.set_rate(change.wire, direction, change.rate)
            case ChangeSpeed():
                for device in change.devices:
                    self._cgroups.set_speed(self._owner, device, change.speed)
            case ChangeNetwork():
                self.network.set_connected(change.wire, change.connected)

    def restore(self) -> None:
        """Give every link and device what the file says."""
        for device, speed in self._file.speeds.items():
            self.change(ChangeSpeed(devices=(device,), speed=speed))
        for wire, link in self._file.wires.items():
            self.change(ChangeRate(wire=wire, directions=("up",), rate=link.rates.up))
            self.change(ChangeRate(wire=wire, directions=("down",), rate=link.rates.down))
            self.change(ChangeNetwork(wire=wire, connected=True))
