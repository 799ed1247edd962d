"""A lab is built for real: its links carry what the file says, and what they are changed to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.runtime.lab import check, namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.changes import ChangeNetwork, ChangeRate, ChangeSpeed
from paceline.runtime.lab.network import DATA_INTERFACE, MANAGEMENT_INTERFACE
from tests.runtime.lab.support import SMALL, inventory, needs_root, parsed
from tests.runtime.support import DEADLINE_SECONDS

pytestmark = needs_root

CLOSE = 0.12


@pytest.fixture(scope="module")
def built() -> Iterator[BuiltLab]:
    """One lab for all tests of this file."""
    before = inventory()
    lab = BuiltLab(parsed(SMALL))
    lab.build()
    assert len(inventory() - before) > 10
    yield lab
    lab.destroy()
    assert inventory() == before


@pytest.fixture
def lab(built: BuiltLab) -> Iterator[BuiltLab]:
    """It, as the file has it."""
    yield built
    built.restore()


def rates(lab: BuiltLab) -> dict[str, float]:
    """Measured Mbit/s, by `source>target`."""
    return {f"{link.source}>{link.target}": link.measured * 8e-6 for link in check.measure_links(lab.network)}


@contextmanager
def connected(
    lab: BuiltLab, source: str, target: str, *, timeout: float = DEADLINE_SECONDS
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection between the data interfaces of two nodes."""
    with namespace.inside(lab.network.namespace(target)):
        server = socket.create_server((lab.network.address(target), 0))
    with namespace.inside(lab.network.namespace(source)):
        client = socket.socket()
    with server, client:
        client.settimeout(timeout)
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def assert_cut(lab: BuiltLab, source: str, target: str) -> None:
    """Nothing comes through."""
    with pytest.raises(TimeoutError), connected(lab, source, target, timeout=0.3):
        pass


def assert_joined(lab: BuiltLab, source: str, target: str) -> None:
    """Something comes through."""
    with connected(lab, source, target) as (client, server):
        client.sendall(b"through")
        assert server.recv(16) == b"through"


@pytest.mark.slow
def test_each_link_carries_its_rate_in_each_direction(lab: BuiltLab) -> None:
    expected = {
        "a>left": 400,
        "left>a": 400,
        "b>right": 200,
        "right>b": 200,
        "c>core": 100,
        "core>c": 50,
        "left>core": 40,
        "core>left": 40,
        "right>core": 20,
        "core>right": 80,
    }
    assert rates(lab) == {hop: pytest.approx(rate, rel=CLOSE) for hop, rate in expected.items()}


def test_rate_changes_while_traffic_flows_in_one_direction_only(lab: BuiltLab) -> None:
    up, down = lab.network.hops[4:6]
    assert (up.source, down.target) == ("c", "c")
    with check._connection(lab.network, up) as (sender, receiver):
        sending = threading.Thread(target=check._send_forever, args=(sender,))
        sending.start()
        receiver.recv(2**16)
        lab.change(ChangeRate(wire="c", directions=("up",), rate=2e6))
        receiver.close()
        sending.join()
    measured = {link.source: link.measured for link in check.measure_links(lab.network, [up, down])}
    assert measured == {"c": pytest.approx(2e6, rel=CLOSE), "core": pytest.approx(down.rate, rel=CLOSE)}


def test_cut_node_hears_nothing_and_is_told_nothing_until_it_is_healed(lab: BuiltLab) -> None:
    with connected(lab, "a", "c") as (client, server):
        lab.change(ChangeNetwork(wire="c", connected=False))
        assert_cut(lab, "b", "c")
        client.sendall(b"through")
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recv(16)
        lab.change(ChangeNetwork(wire="c", connected=True))
        server.settimeout(DEADLINE_SECONDS)
        assert server.recv(16) == b"through"


def test_cut_rack_keeps_its_inside_and_its_way_to_the_server(lab: BuiltLab) -> None:
    lab.change(ChangeNetwork(wire="left", connected=False))
    assert_cut(lab, "a", "b")
    assert_joined(lab, "a", "left")
    with namespace.inside(lab.network.namespace("a")):
        client = socket.socket()
    with client, socket.create_server((lab.network.host, 0)) as server:
        client.settimeout(DEADLINE_SECONDS)
        client.connect(server.getsockname())


def test_cut_node_keeps_its_inside_and_its_interfaces(lab: BuiltLab) -> None:
    lab.change(ChangeNetwork(wire="a", connected=False))
    assert_joined(lab, "a", "a")
    with namespace.inside(lab.network.namespace("a")):
        assert {name for _, name in socket.if_nameindex()} == {"lo", DATA_INTERFACE, MANAGEMENT_INTERFACE}


def test_devices_get_their_cores_and_what_they_are_changed_to(lab: BuiltLab) -> None:
    file = parsed(SMALL)
    lab.change(ChangeSpeed(devices=("a/cpu0", "b/cpu0"), speed=0.2))
    expected = {**file.speeds, "a/cpu0": 0.2, "b/cpu0": 0.2}
    measured = {device.device: device.measured for device in check.measure_devices(lab, file)}
    assert measured == {name: pytest.approx(speed, rel=CLOSE) for name, speed in expected.items()}


def test_restored_lab_is_that_of_the_file(lab: BuiltLab) -> None:
    lab.change(ChangeRate(wire="right", directions=("up", "down"), rate=1e6))
    lab.change(ChangeNetwork(wire="right", connected=False))
    lab.restore()
    hops = [
        hop for hop in lab.network.hops if "core" in (hop.source, hop.target) and "right" in (hop.source, hop.target)
    ]
    for link in check.measure_links(lab.network, hops):
        assert abs(check.deviation(link)) < CLOSE


def test_labs_of_one_machine_do_not_meet(lab: BuiltLab) -> None:
    other = BuiltLab(parsed(SMALL))
    try:
        other.build()
        assert other.network.host != lab.network.host
        assert not set(other.members_files("a/cpu0")) & set(lab.members_files("a/cpu0"))
        assert_joined(other, "a", "b")
    finally:
        other.destroy()
    assert_joined(lab, "a", "b")
