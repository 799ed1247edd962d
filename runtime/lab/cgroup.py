"""CPU quotas and memory limits, by cgroups of version 1 or 2."""

import contextlib
import re
from abc import ABC, abstractmethod
from pathlib import Path

from paceline.runtime.errors import InvalidRequest

PERIOD_SECONDS = 0.02
"""Longer periods make a device jerky; at a quarter of this, small quotas are not kept."""
MIN_QUOTA_SECONDS = 0.001
"""The least that the kernel takes; a smaller speed gets a longer period."""


class Cgroups(ABC):
    """Groups named OWNER/DEVICE. A device NODE/cpuK is in the folder NODE.cpuK."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots

    @abstractmethod
    def prepare(self, owner: str) -> None:
        """Make the owner's group. It goes before everything else: a device has its speed whatever else runs here, and
        the quotas leave the rest of the machine to the others."""

    @abstractmethod
    def _limit_cpu(self, owner: str, device: str, quota: int, period: int) -> None: ...

    @abstractmethod
    def _limit_memory(self, owner: str, device: str, limit: int) -> None: ...

    @abstractmethod
    def oom_kills(self, owner: str, device: str) -> int:
        """How often a process of the device was killed because its memory was used up."""

    def add(self, owner: str, device: str, *, speed: float, memory: int | None) -> None:
        """Make a device's group: CPU cores, and B or no limit."""
        for root in self._roots:
            self._folder(root, owner, device).mkdir()
        self.set_speed(owner, device, speed)
        if memory is not None:
            self._limit_memory(owner, device, memory)

    def set_speed(self, owner: str, device: str, speed: float) -> None:
        """Change the CPU cores of a device."""
        period = max(PERIOD_SECONDS, MIN_QUOTA_SECONDS / speed)
        self._limit_cpu(owner, device, round(period * speed * 1e6), round(period * 1e6))

    def members_files(self, owner: str, device: str) -> list[str]:
        """Files that a process writes 0 into to become a member."""
        return [str(self._folder(root, owner, device) / "cgroup.procs") for root in self._roots]

    def owners(self) -> set[str]:
        """Names of all groups at the top, ours and others'."""
        return {folder.name for root in self._roots for folder in root.iterdir() if folder.is_dir()}

    def processes(self, owner: str) -> set[int]:
        """Pids of all members of an owner's groups."""
        return {
            int(pid)
            for root in self._roots
            for file in (root / owner).glob("*/cgroup.procs")
            for pid in _read(file).split()
        }

    def remove(self, owner: str) -> None:
        """Remove the owner's groups, which are without members."""
        for root in self._roots:
            for folder in ((root / owner).glob("*/"), (root / owner,)):
                for each in folder:
                    with contextlib.suppress(FileNotFoundError):
                        each.rmdir()

    @staticmethod
    def _folder(root: Path, owner: str, device: str) -> Path:
        return root / owner / device.replace("/", ".")


class CgroupsV1(Cgroups):
    """One tree per controller."""

    def __init__(self, cpu: Path, memory: Path) -> None:
        super().__init__(cpu, memory)
        self._cpu, self._memory = cpu, memory

    def prepare(self, owner: str) -> None:
        for root in self._roots:
            (root / owner).mkdir()
        _write(self._cpu / owner / "cpu.shares", 262_144)

    def _limit_cpu(self, owner: str, device: str, quota: int, period: int) -> None:
        folder = self._folder(self._cpu, owner, device)
        _write(folder / "cpu.cfs_period_us", period)
        _write(folder / "cpu.cfs_quota_us", quota)

    def _limit_memory(self, owner: str, device: str, limit: int) -> None:
        folder = self._folder(self._memory, owner, device)
        _write(folder / "memory.limit_in_bytes", limit)
        with_swap = folder / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            _write(with_swap, limit)

    def oom_kills(self, owner: str, device: str) -> int:
        return _counter(self._folder(self._memory, owner, device) / "memory.oom_control")


class CgroupsV2(Cgroups):
    """One tree for all controllers, which each level hands down to the next."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._root = root

    def prepare(self, owner: str) -> None:
        _write(self._root / "cgroup.subtree_control", "+cpu +memory")
        (self._root / owner).mkdir()
        _write(self._root / owner / "cgroup.subtree_control", "+cpu +memory")
        _write(self._root / owner / "cpu.weight", 10_000)

    def _limit_cpu(self, owner: str, device: str, quota: int, period: int) -> None:
        _write(self._folder(self._root, owner, device) / "cpu.max", f"{quota} {period}")

    def _limit_memory(self, owner: str, device: str, limit: int) -> None:
        folder = self._folder(self._root, owner, device)
        _write(folder / "memory.max", limit)
        _write(folder / "memory.swap.max", 0)

    def oom_kills(self, owner: str, device: str) -> int:
        return _counter(self._folder(self._root, owner, device) / "memory.events")


def find_cgroups(mounts: str = "/proc/self/mounts") -> Cgroups:
    """The version that has both controllers here. Raises InvalidRequest if none has."""
    version1: dict[str, Path] = {}
    for device, folder, kind, options, *_ in map(str.split, Path(mounts).read_text().splitlines()):
        del device
        if kind == "cgroup2" and {"cpu", "memory"} <= set(_read(Path(folder) / "cgroup.controllers").split()):
            return CgroupsV2(Path(folder))
        if kind == "cgroup":
            version1.update(dict.fromkeys(options.split(","), Path(folder)))
    if {"cpu", "memory"} <= version1.keys():
        return CgroupsV1(version1["cpu"], version1["memory"])
    raise InvalidRequest("a lab needs the cgroup controllers cpu and memory, which are not mounted here; use local:4")


def _write(path: Path, value: object) -> None:
    path.write_text(str(value))


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return path.read_text()
    return ""


def _counter(path: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    return int(found[1]) if found else 0
