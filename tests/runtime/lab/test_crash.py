"""What a lab leaves behind: nothing, or what the next one removes; and never does that touch what others made."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pyroute2 import IPRoute, netns

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.lab import namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.cgroup import find_cgroups
from paceline.runtime.lab.network import Network
from paceline.runtime.lab.owner import is_dead, new_owner, owner_of
from paceline.runtime.launch.lab import Lab
from tests.runtime.lab.support import PAIR, SMALL, inventory, needs_root, parsed, write
from tests.runtime.support import DEADLINE_SECONDS

PACELINE = str(Path(sys.executable).with_name("paceline"))

PAUSE_INSIDE = """
import signal, sys
for each in sys.argv[1:]:
    open(each, "w").write("0")
print(flush=True)
signal.pause()
"""


def test_owner_tells_our_things_of_living_and_dead_processes() -> None:
    owner = new_owner()
    assert owner_of(f"{owner}-some-node") == owner
    assert not is_dead(owner)
    _, pid, ticks, number = owner.split("-")
    assert is_dead(f"paceline-{pid}-{int(ticks) + 1}-{number}")
    with subprocess.Popen(["true"]) as gone:
        pass
    assert is_dead(f"paceline-{gone.pid}-{ticks}-{number}")
    assert owner_of("paceline-foreign") is None
    assert owner_of("my-paceline-1-2-3") is None
    assert new_owner() != owner


@pytest.fixture
def foreign() -> Iterator[set[str]]:
    """Things that look a little like ours."""
    name = "paceline-foreign"
    namespace.create(name)
    folders = [root / name for root in find_cgroups()._roots]
    for folder in folders:
        folder.mkdir()
    with IPRoute() as ip:
        ip.link("add", ifname="pacelinefgn", kind="bridge")
        yield {f"namespace {name}", f"cgroup {name}", "link pacelinefgn"}
        ip.link("del", ifname="pacelinefgn")
    netns.remove(name)
    for folder in folders:
        folder.rmdir()


@needs_root
@pytest.mark.slow
def test_next_lab_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path: Path, foreign: set[str]) -> None:
    before = inventory()
    assert foreign <= before
    command = [PACELINE, "runtime", "--cluster", f"lab:{write(tmp_path, PAIR)}", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert "listens on" in process.stderr.readline()
            children = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_SECONDS)
    assert alive == []
    left = inventory() - before
    assert {each.partition(" ")[0] for each in left} == {"namespace", "link", "cgroup"}
    assert all(f"paceline-{process.pid}-" in each for each in left)

    lab = BuiltLab(parsed(PAIR))
    lab.build()
    try:
        assert not left & inventory()
    finally:
        lab.destroy()
    assert inventory() == before


@needs_root
def test_lab_that_cannot_be_built_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inventory()

    def no_buckets(network: Network, act: str, hop: object) -> None:
        raise OSError("no tbf")

    monkeypatch.setattr(Network, "_shape", no_buckets)
    with pytest.raises(InvalidRequest, match=r"cannot build lab small here: no tbf; it needs .* use local:4"):
        BuiltLab(parsed(SMALL)).build()
    assert inventory() == before


@needs_root
def test_launcher_that_is_closed_while_it_builds_leaves_nothing(tmp_path: Path) -> None:
    before = inventory()

    async def start_and_give_up() -> None:
        launcher = Lab(str(write(tmp_path, PAIR)))
        starting = asyncio.create_task(launcher.start(lambda *_: None))
        await asyncio.sleep(0)
        starting.cancel()
        await launcher.close()

    asyncio.run(start_and_give_up())
    assert inventory() == before


@needs_root
def test_process_inside_a_lab_ends_with_it() -> None:
    lab = BuiltLab(parsed(PAIR))
    lab.build()
    try:
        files = lab.members_files("a/cpu0")
        with subprocess.Popen([sys.executable, "-c", PAUSE_INSIDE, *files], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            lab.destroy()
            assert process.wait(DEADLINE_SECONDS) == -9
    finally:
        lab.destroy()
