"""The house around the code: packaging, stubs, links, import rules, sizes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
ROOMS = ("tuner", "env", "runtime", "proto")
SOURCES = sorted(
    path.relative_to(ROOT)
    for room in ROOMS
    for suffix in ("*.py", "*.pyi", "*.proto")
    for path in (ROOT / room).rglob(suffix)
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that stands in the repository's root."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def requirement(name: str) -> str:
    """The one version specifier of a requirement in pyproject, e.g. `>=1.85.1`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    (found,) = [wanted for wanted in map(Requirement, lines) if wanted.name == name]
    return str(found.specifier)


def stub_versions(pattern: str, line: str) -> set[str]:
    """The versions that the generated files matching the pattern carry."""
    stubs = [*(ROOT / "proto/paceline/v1").glob(pattern)]
    return {re.search(line, stub.read_text(), re.MULTILINE)[1] for stub in stubs}  # type: ignore[index]


@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection"])
def test_grpc_floor_is_what_the_stubs_demand(package: str) -> None:
    (generated,) = stub_versions("*_pb2_grpc.py", r"^GRPC_GENERATED_VERSION = '(.*)'$")
    assert requirement(package) == f">={generated}"
    assert requirement("grpcio-tools") == f"=={generated}"


def test_protobuf_floor_is_what_the_stubs_demand() -> None:
    (generated,) = stub_versions("*_pb2.py", r"^# Protobuf Python Version: (.*)$")
    assert requirement("protobuf") == f">={generated}"


def test_every_requirement_has_a_constraint() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    versions = {pin.name.lower().replace("_", "-"): str(pin.specifier).removeprefix("==") for pin in pins}
    for wanted in map(Requirement, project["dependencies"] + project["optional-dependencies"]["dev"]):
        assert wanted.specifier.contains(versions[wanted.name]), wanted


def test_git_sees_every_source_of_every_room() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of files to look at")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *ROOMS]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {str(path) for path in SOURCES} <= set(seen)
    assert {f"{room}/__init__.py" for room in ROOMS} <= set(seen)


@pytest.mark.parametrize("room", ROOMS)
def test_import_package_links_to_the_room(room: str) -> None:
    assert (ROOT / "src/paceline" / room).readlink() == Path(f"../../{room}")


@pytest.mark.parametrize("room", ROOMS)
def test_room_refuses_another_name(room: str) -> None:
    done = python(f"import {room}")
    assert f"ImportError: import this package as paceline.{room}, not {room}" in done.stderr


def test_runtime_imports_no_learning_and_no_tracking() -> None:
    done = python(
        "import importlib, pkgutil, sys, paceline.runtime\n"
        "names = [m.name for m in pkgutil.walk_packages(paceline.runtime.__path__, 'paceline.runtime.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "assert 'torch' in sys.modules and 'paceline.runtime.errors' in sys.modules\n"
        "print(*{'gymnasium', 'stable_baselines3', 'sb3_contrib', 'mlflow'} & set(sys.modules))"
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize("path", [path for path in SOURCES if "_pb2" not in path.name], ids=str)
def test_file_is_under_400_lines(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) < 400
