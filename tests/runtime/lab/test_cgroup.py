"""What is written into cgroups of both versions, in folders that stand in for the mounts."""

from pathlib import Path

import pytest

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.lab.cgroup import CgroupsV1, CgroupsV2, find_cgroups


def contents(root: Path) -> dict[str, str]:
    """All files below a folder."""
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_version_2_hands_controllers_down_and_limits_the_device(tmp_path: Path) -> None:
    cgroups = CgroupsV2(tmp_path)
    cgroups.prepare("owner")
    cgroups.add("owner", "a/cpu0", speed=0.2, memory=2**29)
    assert contents(tmp_path) == {
        "cgroup.subtree_control": "+cpu +memory",
        "owner/cgroup.subtree_control": "+cpu +memory",
        "owner/cpu.weight": "10000",
        "owner/a.cpu0/cpu.max": "4000 20000",
        "owner/a.cpu0/memory.max": str(2**29),
        "owner/a.cpu0/memory.swap.max": "0",
    }
    assert cgroups.members_files("owner", "a/cpu0") == [str(tmp_path / "owner/a.cpu0/cgroup.procs")]
    assert cgroups.oom_kills("owner", "a/cpu0") == 0
    (tmp_path / "owner/a.cpu0/memory.events").write_text("low 0\nhigh 0\nmax 8\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert cgroups.oom_kills("owner", "a/cpu0") == 2
    (tmp_path / "owner/a.cpu0/cgroup.procs").write_text("12\n34\n")
    assert cgroups.processes("owner") == {12, 34}
    assert cgroups.owners() == {"owner"}


def test_version_1_has_a_tree_per_controller(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu", tmp_path / "memory"
    cpu.mkdir()
    memory.mkdir()
    cgroups = CgroupsV1(cpu, memory)
    cgroups.prepare("owner")
    cgroups.add("owner", "a/cpu0", speed=0.2, memory=2**29)
    assert contents(tmp_path) == {
        "cpu/owner/cpu.shares": "262144",
        "cpu/owner/a.cpu0/cpu.cfs_period_us": "20000",
        "cpu/owner/a.cpu0/cpu.cfs_quota_us": "4000",
        "memory/owner/a.cpu0/memory.limit_in_bytes": str(2**29),
    }
    assert len(cgroups.members_files("owner", "a/cpu0")) == 2
    (memory / "owner/a.cpu0/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert cgroups.oom_kills("owner", "a/cpu0") == 5


def test_quota_below_what_the_kernel_takes_gets_a_longer_period(tmp_path: Path) -> None:
    cgroups = CgroupsV2(tmp_path)
    cgroups.prepare("owner")
    cgroups.add("owner", "a/cpu0", speed=0.01, memory=None)
    assert (tmp_path / "owner/a.cpu0/cpu.max").read_text() == "1000 100000"
    assert not (tmp_path / "owner/a.cpu0/memory.max").exists()


@pytest.mark.parametrize(
    ("controllers", "version1", "kind"),
    [
        ("cpuset cpu io memory pids", False, CgroupsV2),
        ("hugetlb", True, CgroupsV1),
        ("cpu memory", True, CgroupsV2),
        ("hugetlb", False, None),
        ("cpu", False, None),
    ],
)
def test_version_is_the_one_whose_mounts_have_both_controllers(
    tmp_path: Path, controllers: str, version1: bool, kind: type | None
) -> None:
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text(controllers)
    lines = ["proc /proc proc rw 0 0", f"cgroup2 {unified} cgroup2 rw,relatime 0 0"]
    if version1:
        lines[1:1] = [f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0", f"cgroup {tmp_path}/m cgroup rw,memory 0 0"]
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    if kind is None:
        with pytest.raises(InvalidRequest, match=r"needs the cgroup controllers cpu and memory, .* use local:4"):
            find_cgroups(str(tmp_path / "mounts"))
    else:
        assert type(find_cgroups(str(tmp_path / "mounts"))) is kind
