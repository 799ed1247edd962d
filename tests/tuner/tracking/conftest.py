"""A store per test, and processes that use one of their own accord."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline.tuner.tracking.store import TrackingStore

ROOT = Path(__file__).parents[3]
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's file as `open_store` first makes it: migrations take a second, a copy of the file does not."""
    from paceline.tuner.tracking.store import open_store

    return open_store(f"sqlite:///{tmp_path_factory.mktemp('schema')}/paceline.db").path


@pytest.fixture
def uri(schema: Path, tmp_path: Path) -> str:
    """A store of the test's own, under a path that must be quoted in a URI."""
    folder = tmp_path / "with späce"
    folder.mkdir()
    shutil.copy(schema, folder / "paceline.db")
    return f"sqlite:///{folder}/paceline.db"


@pytest.fixture
def tracking(uri: str) -> "TrackingStore":
    from paceline.tuner.tracking.store import open_store

    return open_store(uri)


Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start Python on some code, with pipes for its input and output; killed when the test ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()
