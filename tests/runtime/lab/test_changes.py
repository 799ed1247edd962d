"""Changes while a lab runs: how they are written, and that all are checked before any is made."""

import os
import signal

import pytest

from paceline.runtime.errors import InvalidRequest
from paceline.runtime.lab.changes import Change, ChangeNetwork, ChangeRate, ChangeSpeed, ChangeState, parse_changes
from paceline.runtime.launch.local import Local
from tests.runtime.lab.support import SMALL, parsed


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit of speeds on every machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("a.link=50 Mbit/s", ChangeRate(wire="a", directions=("up", "down"), rate=6.25e6)),
        ("a.link.up = 50Mbit/s", ChangeRate(wire="a", directions=("up",), rate=6.25e6)),
        ("left.uplink.down=1 MB/s", ChangeRate(wire="left", directions=("down",), rate=1e6)),
        ("left.uplink=1 MB/s", ChangeRate(wire="left", directions=("up", "down"), rate=1e6)),
        ("a/cpu1.speed=0.05", ChangeSpeed(devices=("a/cpu1",), speed=0.05)),
        ("a.speed=0.05", ChangeSpeed(devices=("a/cpu0", "a/cpu1"), speed=0.05)),
        ("c.state=killed", ChangeState(node="c", signum=signal.SIGKILL)),
        ("c.state=frozen", ChangeState(node="c", signum=signal.SIGSTOP)),
        ("c.state=running", ChangeState(node="c", signum=signal.SIGCONT)),
        ("right.network=cut", ChangeNetwork(wire="right", connected=False)),
        ("c.network=up", ChangeNetwork(wire="c", connected=True)),
    ],
)
def test_change_means(text: str, change: Change) -> None:
    assert parse_changes(parsed(SMALL), [text]) == (change,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.link", "change 'a.link': write TARGET.SETTING=VALUE; for example e0.link=50 Mbit/s"),
        ("a=3", "change 'a=3': write TARGET.SETTING=VALUE"),
        ("lft.uplink=1 MB/s", "unknown node, rack or device 'lft'; did you mean 'left'?"),
        ("a.uplink=1 MB/s", "unknown setting of a 'uplink'; did you mean 'link'?"),
        ("left.state=killed", "unknown setting of left 'state'; "),
        ("a.state=freeze", "unknown state 'freeze'; did you mean 'frozen'?"),
        ("a.network=down", "unknown network 'down'; "),
        ("a.link=50 mbit", "change 'a.link=50 mbit': rate '50 mbit' has the unknown unit 'mbit'; did you mean "),
        ("b/cpu0.speed=0", "change 'b/cpu0.speed=0': speed '0' must be a number of CPU cores, 0.01 or more"),
        ("b.speed=1.5", "change 'b.speed=1.5': speeds add up to 2.2 cores, and this machine has 2; scale them by"),
    ],
)
def test_wrong_change_is_refused_with_all_others(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_changes(parsed(SMALL), ["a.link=50 Mbit/s", text])
    assert str(refused.value).startswith(message)


def test_speed_that_an_earlier_change_makes_room_for() -> None:
    assert len(parse_changes(parsed(SMALL), ["a.speed=0.01", "b.speed=1.7"])) == 2


def test_local_refuses_changes() -> None:
    with pytest.raises(InvalidRequest, match="only a lab can be changed: lab:two-racks"):
        Local("2").check_changes(["a.link=50 Mbit/s"])
