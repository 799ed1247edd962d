"""`paceline probe`: a measured profile as JSON and as a picture, a kept one as tables, a runtime's own."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from paceline.runtime import launch
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.probe.store import ProfileStore, fingerprint, profiles_folder, read_cluster
from paceline.runtime.server.service import start_service
from tests.runtime.probe.simulated import two_racks
from tests.tuner.conftest import CommandLine


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without profiles."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, pixels."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


@pytest.mark.slow
def test_json_is_a_profile_and_what_follows_from_it(paceline: CommandLine, home: Path) -> None:
    picture = home / "rates.png"
    status, out, _ = paceline(f"probe --cluster local:2 --json --heatmap {picture}")
    assert status == 0
    found = json.loads(out)
    assert found["fingerprint"] == fingerprint(launch.create("local:2"))
    kept = read_cluster(profiles_folder() / f"{found['fingerprint']}.json")
    (home / "printed.json").write_text(out)
    assert read_cluster(home / "printed.json") == kept
    assert [device["name"] for device in found["devices"]] == ["localhost/cpu0", "localhost/cpu1"]
    assert found["seconds"] > 0
    assert found["balance"]["memory"] > 0
    assert found["balance"]["network"] > 0
    assert found["limits"]["workload"] == "bytes-lm/small"
    assert found["limits"]["limit"] in ("compute", "network", "waiting")
    assert found["heatmap"] == str(picture)
    assert all(300 <= pixels <= 3000 for pixels in png_size(picture))


def test_kept_profile_is_shown_without_starting_anything(
    paceline: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    launcher, profiles = launch.create("lab:two-racks"), ProfileStore(profiles_folder())
    profiles.save(launcher, two_racks(uplink=1e6))
    status, out, error = paceline("probe --cluster lab:two-racks")
    assert (status, error) == (0, "")
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    # Nodes of a rack stand next to each other.
    assert [line.split("/")[0] for line in lines if "/cpu0 cpu " in line] == ["e0", "e1", "w0", "w1"]
    assert "rack e0/cpu0, e1/cpu0 8.0" in lines
    assert "w1 400/4 400/4 400/400" in lines
    assert "PCIe" not in out
    assert "Balance: 0.4 B of memory and 5e-05 B of network per FLOP." in lines
    assert "so the network limits it, most of all at the racks' ways out. It asks for " in out
    path = profiles.path(launcher)
    assert lines[-2:] == [f"Profile (kept from an earlier probe): {path}", f"Heat map: {path.with_suffix('.png')}"]
    assert all(300 <= pixels <= 3000 for pixels in png_size(path.with_suffix(".png")))


def test_workload_that_cannot_run_there_is_said_to(paceline: CommandLine) -> None:
    cluster, launcher = two_racks(), launch.create("lab:two-racks")
    devices = tuple(dataclasses.replace(cluster.devices[0], name=f"e0/cpu{index}") for index in range(17))
    link = dataclasses.replace(cluster.links[0], target="e0")
    crowd = dataclasses.replace(cluster, devices=devices, links=(link,), tiers=())
    ProfileStore(profiles_folder()).save(launcher, crowd)
    command = "probe --cluster lab:two-racks --workload bytes-lm/tiny"
    status, out, _ = paceline(f"{command} --json")
    assert (status, json.loads(out)["limits"]) == (0, None)
    status, out, _ = paceline(command)
    assert status == 0
    assert "\nbytes-lm/tiny cannot run here under the default strategy: " in out


@pytest.mark.slow
def test_runtime_is_asked_for_what_it_knows(paceline: CommandLine) -> None:
    with EmbeddedRuntime("local:1") as runtime:
        start = start_service(runtime._runtime, "127.0.0.1", 0)
        server, port = asyncio.run_coroutine_threadsafe(start, runtime._loop).result()
        status, out, _ = paceline(f"probe --runtime 127.0.0.1:{port} --json")
        asyncio.run_coroutine_threadsafe(server.stop(None), runtime._loop).result()
        (device,) = runtime.describe_cluster().devices
    found = json.loads(out)
    assert status == 0
    assert found["devices"][0]["profile"]["flops"] == device.profile.flops
    assert [found[name] for name in ("fingerprint", "seconds", "heatmap")] == [None, None, None]
    assert not profiles_folder().exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--workload bytes-lm/smal", "paceline: unknown workload 'bytes-lm/smal'; did you mean 'bytes-lm/small'?\n"),
        ("--cluster lab:two-rack", "paceline: unknown lab cluster 'two-rack'; did you mean 'two-racks'?\n"),
        ("--fresh --runtime h:1", "paceline: --fresh has no effect with --runtime h:1; leave one of them out\n"),
        ("--heatmap no/rates.png", "paceline: heat map no/rates.png must be a file in a folder that exists\n"),
        ("--heatmap .", "paceline: heat map . must be a file in a folder that exists\n"),
    ],
)
def test_wrong_request_is_one_line(paceline: CommandLine, command: str, message: str) -> None:
    status, out, error = paceline(f"probe {command}")
    assert (status, out, error) == (2, "", message)
