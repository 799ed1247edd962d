"""The tracking store: where it is, what is refused, many first users at once, and what a killed process leaves."""

import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.runtime.errors import Conflict, CorruptFile, InvalidRequest, PacelineError
from paceline.tuner.tracking.owner import HOST, PID, STARTED, owner_tags
from paceline.tuner.tracking.store import TrackingStore, default_tracking_uri, every, open_store
from tests.tuner.tracking.samples import SPEC, open_session

Spawn = Callable[..., "subprocess.Popen[str]"]

OPEN_AND_WAIT = """
import sys
from tests.tuner.tracking.samples import SPEC, open_session
from paceline.tuner.tracking.store import open_store
print("imported", flush=True)
sys.stdin.readline()
with open_session(open_store(sys.argv[1])) as session, session.start_trial(SPEC, name="t") as trial:
    trial.log({"m": 1.0})
    print(session.run_id, trial.run_id, flush=True)
    sys.stdin.readline()
"""

STUCK_IN_MIGRATION = """
import sys
from alembic import command
from paceline.tuner.tracking.store import open_store
def stuck(*_):
    print("half made", flush=True)
    sys.stdin.readline()
command.upgrade = stuck
open_store(sys.argv[1])
"""


def say(process: "subprocess.Popen[str]") -> str:
    """Let the process go on, and read its next line."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def hear(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def statuses(tracking: TrackingStore, *run_ids: str) -> set[str]:
    return {tracking.client.get_run(run_id).info.status for run_id in run_ids}


def test_default_is_under_paceline_home_else_xdg_else_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    monkeypatch.setenv("PACELINE_HOME", "/p")
    assert default_tracking_uri() == "sqlite:////p/paceline.db"
    monkeypatch.delenv("PACELINE_HOME")
    assert default_tracking_uri() == "sqlite:////x/paceline/paceline.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_tracking_uri() == "sqlite:////h/.local/share/paceline/paceline.db"


@pytest.mark.parametrize(
    "uri",
    ["file:/d/mlruns", "file:///d", "/d", "mlruns", "", "http://h:1", "postgresql://h/d", "sqlite://",
     "sqlite:///:memory:", "sqlite:///d?mode=ro"],
)  # fmt: skip
def test_a_uri_that_is_no_sqlite_file_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be a SQLite file, .* for example sqlite:////") as caught:
        open_store(uri)
    assert repr(uri) in str(caught.value)


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Conflict, match=r"file/sub/paceline\.db: its folder must be writable \(Not a directory"):
        open_store(f"sqlite:///{tmp_path}/file/sub/paceline.db")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match=f"{tmp_path}: the file must be writable"):
        open_store(f"sqlite:///{tmp_path}")


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that anyone may write to, as a user for whom permissions count."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        if root:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)


def test_a_read_only_folder_is_refused(unprivileged: Path) -> None:
    folder = unprivileged / "mine"
    folder.mkdir(mode=0o500)
    with pytest.raises(Conflict, match=r"mine/paceline\.db: its folder must be writable \(Permission denied"):
        open_store(f"sqlite:///{folder}/paceline.db")
    assert not any(folder.iterdir())


def test_a_read_only_file_is_refused(unprivileged: Path) -> None:
    path = unprivileged / "paceline.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (x)")
    path.chmod(0o400)
    with pytest.raises(Conflict, match=r"paceline\.db: the file must be writable \(attempt to write a readonly"):
        open_store(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary" * 100)
    with pytest.raises(CorruptFile, match=r"notes\.txt: must be a SQLite database"):
        open_store(f"sqlite:///{path}")
    assert path.read_text() == "dear diary" * 100


def test_a_truncated_database_is_refused(uri: str) -> None:
    path = Path(uri.removeprefix("sqlite:///"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptFile, match=r"paceline\.db: must be a SQLite database"):
        open_store(uri)


def test_a_schema_of_another_mlflow_is_refused_in_one_line(uri: str) -> None:
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    with pytest.raises(PacelineError, match=r"out-of-date database schema .*mlflow db upgrade") as caught:
        open_store(uri)
    assert "\n" not in str(caught.value)


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "paceline.db"
    path.touch()
    tracking = open_store(f"sqlite:///{path}")
    assert tracking.uri == f"sqlite:///{path}"
    assert [experiment.name for experiment in every(tracking.client.search_experiments)] == ["Default"]


def test_a_relative_file_is_the_same_store_after_a_change_of_folder(
    schema: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(schema.parent)
    tracking = open_store("sqlite:///paceline.db")
    assert tracking.path == schema


def test_a_deleted_experiment_is_taken_back(tracking: TrackingStore) -> None:
    experiment = tracking.experiment_id("w")
    tracking.client.delete_experiment(experiment)
    assert tracking.experiment_id("w") == experiment
    assert tracking.client.get_experiment(experiment).lifecycle_stage == "active"


def test_every_reads_all_pages(tracking: TrackingStore) -> None:
    names = {f"e{index}" for index in range(5)}
    for name in names:
        tracking.experiment_id(name)
    found = [experiment.name for experiment in every(tracking.client.search_experiments, max_results=2)]
    assert sorted(found) == sorted({*names, "Default"})


@pytest.mark.slow
def test_processes_may_start_at_once_on_an_empty_store(tmp_path: Path, spawn: Spawn) -> None:
    uri = f"sqlite:///{tmp_path}/new/paceline.db"
    processes = [spawn(OPEN_AND_WAIT, uri) for _ in range(4)]
    assert [hear(process) for process in processes] == ["imported"] * 4
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n\n")
        process.stdin.flush()
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    tracking = open_store(uri)
    assert len({run_id for output in outputs for run_id in output}) == 8
    for session, trial in outputs:
        assert statuses(tracking, session, trial) == {"FINISHED", "KILLED"}
        assert tracking.client.get_run(trial).data.tags["mlflow.parentRunId"] == session
    (experiment,) = {tracking.client.get_run(session).info.experiment_id for session, _ in outputs}
    assert experiment == tracking.experiment_id("bytes-lm/tiny")


def test_a_process_killed_while_making_the_store_leaves_no_half_of_one(tmp_path: Path, spawn: Spawn) -> None:
    path = tmp_path / "paceline.db"
    process = spawn(STUCK_IN_MIGRATION, f"sqlite:///{path}")
    assert hear(process) == "half made"
    process.kill()
    process.wait()
    assert not path.exists()
    assert open_store(f"sqlite:///{path}").experiment_id("w")


def test_runs_are_killed_with_their_process_and_not_before(tracking: TrackingStore, spawn: Spawn) -> None:
    process = spawn(OPEN_AND_WAIT, tracking.uri)
    assert hear(process) == "imported"
    runs = say(process).split()
    open_store(tracking.uri)
    assert statuses(tracking, *runs) == {"RUNNING"}
    process.kill()
    # Nobody has read the exit status yet, as when the parent is killed too or does not care: a zombie.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    open_store(tracking.uri)
    assert statuses(tracking, *runs) == {"KILLED"}


def test_only_runs_of_a_gone_process_on_this_host_are_ended(tracking: TrackingStore) -> None:
    experiment = tracking.experiment_id("w")
    mine = owner_tags()
    earlier = f"{float(mine[STARTED]) - 100:.2f}"

    def status(tags: dict[str, str]) -> str:
        run = tracking.client.create_run(experiment, tags=tags)
        open_store(tracking.uri)
        return str(tracking.client.get_run(run.info.run_id).info.status)

    assert status(mine) == "RUNNING"
    assert status({}) == "RUNNING"
    assert status({**mine, HOST: "elsewhere", STARTED: earlier}) == "RUNNING"
    assert status({**mine, STARTED: earlier}) == "KILLED"
    assert status({**mine, PID: str(2**31 - 1)}) == "KILLED"


def test_a_run_that_ended_stays_as_it_ended(tracking: TrackingStore, spawn: Spawn) -> None:
    process = spawn(OPEN_AND_WAIT, tracking.uri)
    assert hear(process) == "imported"
    session, _ = say(process).split()
    process.communicate("\n")
    open_store(tracking.uri)
    assert statuses(tracking, session) == {"FINISHED"}


def test_a_session_of_this_process_survives_another_open(tracking: TrackingStore) -> None:
    with open_session(tracking) as session, session.start_trial(SPEC, name="t") as trial:
        open_store(tracking.uri)
        assert statuses(tracking, session.run_id, trial.run_id) == {"RUNNING"}
