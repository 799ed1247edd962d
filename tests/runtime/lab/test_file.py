"""Cluster files: what they mean, and the one line that a mistake gets."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime import launch
from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.lab.file import examples, load
from paceline.runtime.lab.units import MEMORY_UNITS, RATE_RANGE, RATE_UNITS, parse_memory, parse_rate
from tests.runtime.lab.support import SMALL, parsed, write

NODE = "{name: a, link: 400 Mbit/s, devices: [{speed: 0.1}]}"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limit of speeds on every machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.parametrize("name", examples())
def test_example_fits_two_cores(name: str) -> None:
    lab = load(name)
    assert lab.name == name
    assert sum(lab.speeds.values()) <= 1.7
    assert examples()[name].endswith(".")


def test_devices_are_numbered_in_the_order_of_the_file() -> None:
    lab = parsed(SMALL)
    assert lab.speeds == {"a/cpu0": 0.4, "a/cpu1": 0.1, "b/cpu0": 0.4, "c/cpu0": 0.2}
    assert list(lab.speeds) == ["a/cpu0", "a/cpu1", "b/cpu0", "c/cpu0"]
    assert [device.memory for _, _, device in lab.devices] == [2**29, None, 2**29, None]


def test_links_form_a_tree_under_the_core_switch() -> None:
    wires = parsed(SMALL).wires
    assert {wire.child: wire.parent for wire in wires.values()} == {
        "a": "left",
        "b": "right",
        "c": "core",
        "left": "core",
        "right": "core",
    }
    assert (wires["right"].rates.up, wires["right"].rates.down) == (2.5e6, 10e6)
    assert (wires["a"].rates.up, wires["a"].rates.down) == (50e6, 50e6)


def test_launcher_has_the_slots_of_the_file_without_building_it(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    lab = launch.create(f"lab:{path}")
    assert [(slot.name, slot.node, slot.pool) for slot in lab.slots] == [
        ("a/cpu0", "a", "a/cpu0"),
        ("a/cpu1", "a", "a/cpu1"),
        ("b/cpu0", "b", "b/cpu0"),
        ("c/cpu0", "c", "c/cpu0"),
    ]
    assert lab.reference == f"lab:{path}"


@given(st.decimals(0, 10_000, places=3), st.sampled_from(list(RATE_UNITS)), st.sampled_from(["", " ", "  "]))
def test_rate_is_its_number_times_its_unit_within_the_range(number: object, unit: str, space: str) -> None:
    value = float(str(number)) * RATE_UNITS[unit]
    text = f"{number}{space}{unit}"
    if RATE_RANGE[0] <= value <= RATE_RANGE[1]:
        assert parse_rate(text) == value
    else:
        with pytest.raises(ValueError, match="must lie between"):
            parse_rate(text)


@given(st.integers(32, 10**6), st.sampled_from(list(MEMORY_UNITS)))
def test_memory_is_whole_bytes(number: int, unit: str) -> None:
    if (value := number * MEMORY_UNITS[unit]) >= 2**24:
        assert parse_memory(f"{number} {unit}") == value


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.integers())))
def test_what_is_no_rate_is_refused_and_never_raises_anything_else(text: object) -> None:
    with suppress(ValueError):
        assert RATE_RANGE[0] <= parse_rate(text) <= RATE_RANGE[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cluster file lab.yaml is not YAML: "),
        ("[1]", "cluster file lab.yaml: Input should be a valid dictionary"),
        ("name: x", "cluster file lab.yaml: nodes: Field required"),
        ("{name: x, nodes: []}", "cluster file lab.yaml: 0 devices in all; use 1 to 64"),
        (
            f"{{name: x, nodes: [{NODE.replace('400 Mbit/s', '400 mbits')}]}}",
            "cluster file lab.yaml: nodes.0.link.up: rate '400 mbits' has the unknown unit 'mbits'; "
            "did you mean '400 Mbit/s'?",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('400 Mbit/s', '400')}]}}",
            "cluster file lab.yaml: nodes.0.link.up: rate 400 must be a number and a unit; for example '400 Mbit/s'",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('400 Mbit/s', '30 Gbit/s')}]}}",
            "cluster file lab.yaml: nodes.0.link.up: rate '30 Gbit/s' must lie between 0.0001 Gbit/s and 20 Gbit/s",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('400 Mbit/s', '{up: 1 Mbit/s}')}]}}",
            "cluster file lab.yaml: nodes.0.link.down: Field required",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('link', 'lnik')}]}}",
            "cluster file lab.yaml: nodes.0: unknown setting 'lnik'; did you mean 'link'?",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('0.1', '0')}]}}",
            "cluster file lab.yaml: nodes.0.devices.0.speed: speed 0 must be a number of CPU cores, 0.01 or more",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('0.1', '0.1, memory: 512 mib')}]}}",
            "cluster file lab.yaml: nodes.0.devices.0.memory: memory '512 mib' has the unknown unit 'mib'; "
            "did you mean '512 MiB'?",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('name: a', 'name: Node_A')}]}}",
            "cluster file lab.yaml: nodes.0.name: String should match pattern '^[a-z0-9-]{1,20}$', got 'Node_A'",
        ),
        (
            f"{{name: x, nodes: [{NODE}, {NODE}]}}",
            "cluster file lab.yaml: name 'a' must be given once",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('name: a', 'name: core')}]}}",
            "cluster file lab.yaml: name 'core' must be given once; 'core' is the core switch",
        ),
        (
            f"{{name: x, racks: [{{name: east, uplink: 1 Gbit/s}}], nodes: [{NODE[:-1]}, rack: eats}}]}}",
            "cluster file lab.yaml: node 'a': unknown rack 'eats'; did you mean 'east'?",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('{speed: 0.1}', '')}]}}",
            "cluster file lab.yaml: node 'a' needs at least one device",
        ),
        (
            f"{{name: x, nodes: [{NODE.replace('0.1', '1.5}, {speed: 1')}]}}",
            "cluster file lab.yaml: speeds add up to 2.5 cores, and this machine has 2; scale them by 0.8",
        ),
    ],
)
def test_mistake_gets_one_line_that_says_what_is_legal(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(str(write(tmp_path, text)))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_unknown_example_and_missing_file() -> None:
    with pytest.raises(UnknownName, match=r"unknown lab cluster 'two-rack'; did you mean 'two-racks'\?"):
        load("two-rack")
    with pytest.raises(InvalidRequest, match=r"no cluster file 'racks\.yaml'; examples: edge-wan, "):
        load("racks.yaml")


def test_without_root_the_refusal_names_local(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.runtime.lab.built import BuiltLab

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InvalidRequest, match="takes root on Linux; without, use local:4"):
        BuiltLab(parsed(SMALL))
