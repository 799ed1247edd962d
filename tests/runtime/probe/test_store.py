"""Profiles are kept under a fingerprint, whole or not at all, and used while it holds."""

from pathlib import Path

import pytest

from paceline.runtime import launch
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import CorruptFile
from paceline.runtime.launch.base import Launcher
from paceline.runtime.launch.local import Local
from paceline.runtime.probe import store
from paceline.runtime.probe.store import ProfileStore, fingerprint, read_cluster
from tests.runtime.probe.simulated import two_racks

FILE = "name: one\nnodes: [{name: a, link: 400 Mbit/s, devices: [{speed: 0.1}]}]\n"


@pytest.fixture
def lab(tmp_path: Path) -> Launcher:
    """A cluster of which profiles are kept; nothing of it is built."""
    path = tmp_path / "one.yaml"
    path.write_text(FILE)
    return launch.create(f"lab:{path}")


@pytest.fixture
def profiles(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "clusters")


def test_profile_is_found_again_until_a_newer_one_is_saved(lab: Launcher, profiles: ProfileStore) -> None:
    assert profiles.load(lab) is None
    profiles.save(lab, two_racks())
    assert profiles.load(lab) == two_racks()
    profiles.save(lab, two_racks(uplink=1e6))
    assert profiles.load(lab) == two_racks(uplink=1e6)
    assert list(profiles.folder.iterdir()) == [profiles.path(lab)]


def test_fingerprint_changes_with_all_that_is_measured(
    lab: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_file(text: str) -> str:
        (tmp_path / "one.yaml").write_text(text)
        return fingerprint(launch.create(lab.reference))

    found = [fingerprint(launch.create(reference)) for reference in ("local:2", "local:3")]
    found += [of_file(FILE), of_file(FILE.replace("400", "200")), of_file(FILE.replace("0.1", "0.2"))]
    for name, value in (("_cpu_model", lambda: "other"), ("version", lambda name: "0.1"), ("PROBE_VERSION", 0)):
        monkeypatch.setattr(store, name, value)
        found.append(of_file(FILE))
    assert len(set(found)) == len(found)
    monkeypatch.undo()
    assert of_file(f"# A comment.\n{FILE}") == fingerprint(lab)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"name": "lab:one"}', None])
def test_file_that_is_no_profile_counts_as_none(lab: Launcher, profiles: ProfileStore, content: bytes | None) -> None:
    profiles.save(lab, two_racks())
    path = profiles.path(lab)
    path.write_bytes(path.read_bytes().replace(b"12500000.0", b"-1.0") if content is None else content)
    with pytest.raises(CorruptFile, match="is no cluster profile: "):
        read_cluster(path)
    assert profiles.load(lab) is None
    profiles.save(lab, two_racks())
    assert profiles.load(lab) == two_racks()


def test_profile_that_cannot_be_written_leaves_the_one_before(
    lab: Launcher, profiles: ProfileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profiles.save(lab, two_racks())

    def fill_disk(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    profiles.save(lab, two_racks(uplink=1e6))
    assert profiles.load(lab) == two_racks()
    assert list(profiles.folder.iterdir()) == [profiles.path(lab)]
    assert caplog.messages == [f"cluster profile {profiles.path(lab)} cannot be kept: No space left on device"]


def test_local_is_always_measured(profiles: ProfileStore) -> None:
    local = launch.create("local:2")
    profiles.save(local, two_racks())
    assert profiles.load(local) is None
    assert read_cluster(profiles.path(local)) == two_racks()


@pytest.mark.slow
def test_runtime_measures_once_and_keeps_what_training_finds(
    profiles: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a lab, which needs root.
    monkeypatch.setattr(Local, "keeps_profile", True)

    def start(*, fresh_probe: bool = False) -> tuple[Cluster, float | None]:
        with EmbeddedRuntime("local:2", profiles=profiles.folder, fresh_probe=fresh_probe) as runtime:
            return runtime.describe_cluster(), runtime.probe_seconds

    measured, seconds = start()
    assert seconds is not None
    assert start() == (measured, None)
    again, seconds = start(fresh_probe=True)
    assert seconds is not None
    assert again != measured
    with EmbeddedRuntime("local:2", profiles=profiles.folder) as runtime:
        runtime._runtime._publish_and_keep(measured)
    assert start() == (measured, None)
