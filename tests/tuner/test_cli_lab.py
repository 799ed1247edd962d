"""`paceline lab`: examples listed and shown, labs checked, running labs changed."""

import json
from pathlib import Path

import pytest

from paceline.runtime.lab import check
from paceline.runtime.lab.file import examples
from tests.runtime.lab.support import SMALL, inventory, needs_root, write
from tests.tuner.conftest import CommandLine


def test_examples_are_listed_and_shown_as_files(paceline: CommandLine, tmp_path: Path) -> None:
    status, listed, _ = paceline("lab list")
    assert (status, [line.split()[0] for line in listed.splitlines()]) == (0, list(examples()))
    status, shown, _ = paceline("lab show two-racks")
    assert status == 0
    assert write(tmp_path, shown).read_text() == shown
    assert "name: two-racks" in shown


@needs_root
@pytest.mark.slow
def test_check_measures_every_link_and_device(
    paceline: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inventory()
    path = write(tmp_path, SMALL)
    status, out, _ = paceline(f"lab check {path} --json")
    checked = json.loads(out)
    assert status == 0
    assert {(link["from"], link["to"]) for link in checked["links"]} >= {("a", "left"), ("left", "core"), ("core", "c")}
    assert [(device["node"], device["device"]) for device in checked["devices"]] == [
        ("a", "a/cpu0"),
        ("a", "a/cpu1"),
        ("b", "b/cpu0"),
        ("c", "c/cpu0"),
    ]
    for each in (*checked["links"], *checked["devices"]):
        assert each["measured"] == pytest.approx(each["configured"], rel=check.TOLERANCE)

    # Headers alone take more than this.
    monkeypatch.setattr(check, "TOLERANCE", 0.001)
    status, out, _ = paceline(f"lab check {path}")
    assert status == 1
    assert "Links, Mbit/s" in out
    assert "a/cpu1" in out
    assert inventory() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("lab show two-rack", "paceline: unknown lab cluster 'two-rack'; did you mean 'two-racks'?\n"),
        ("lab check no.yaml", "paceline: no cluster file 'no.yaml'; examples: "),
        ("lab set a.link=3", "paceline lab set: Missing option '--runtime'; see paceline lab set --help\n"),
        ("lab set a.link=3 --runtime 127.0.0.1", "paceline: address '127.0.0.1' must be HOST:PORT"),
    ],
)
def test_wrong_request_is_one_line(paceline: CommandLine, command: str, message: str) -> None:
    status, out, error = paceline(command)
    assert (status, out) == (2, "")
    assert error.startswith(message)
    assert error.count("\n") == 1
