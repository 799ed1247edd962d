"""The tracking store: a SQLite file with the artifacts beside it, checked before anything starts."""

import fcntl
import logging
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from paceline.runtime.errors import Conflict, CorruptFile, InvalidRequest, PacelineError
from paceline.runtime.home import home
from paceline.tuner.tracking.owner import HOST, owner_is_gone

_BUSY_SECONDS = 20.0
_REMEDY = "name a writable file with --tracking-uri sqlite:////PATH/paceline.db, or a folder with PACELINE_HOME"


def default_tracking_uri() -> str:
    """`paceline.db` in this user's folder."""
    return f"sqlite:///{home() / 'paceline.db'}"


@dataclass(frozen=True, kw_only=True)
class TrackingStore:
    """An opened store. Safe to share between threads; other processes open the same `uri` themselves."""

    path: Path
    """The SQLite file, absolute."""
    client: MlflowClient
    """Bound to this store for runs and for registered models."""

    @property
    def uri(self) -> str:
        """What `open_store`, MLflow and its UI take."""
        return f"sqlite:///{self.path}"

    @property
    def artifact_root(self) -> Path:
        """Folder that holds one folder of artifacts per run."""
        return self.path.parent / "artifacts"

    def experiment_id(self, name: str) -> str:
        """The experiment of this name: created if need be, taken back if it was deleted."""
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return self.client.create_experiment(name, artifact_location=self.artifact_root.as_uri())
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                return self.experiment_id(name)
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def errors(self) -> AbstractContextManager[None]:
        """Raise what MLflow raises inside as a PacelineError of one line."""
        return _one_line_errors(self.path)


def open_store(uri: str) -> TrackingStore:
    """Check and open a store, creating it if need be, and close the runs that killed processes left running.

    Any number of processes may do so at once. Raises InvalidRequest for a URI that names no SQLite file,
    Conflict for a file that cannot be written, CorruptFile for one that is no database, and PacelineError for
    one with the schema of another MLflow version.
    """
    path = _database_path(uri)
    _ignore_ambient_context()
    with _initialisation_lock(path):
        if path.exists() and (path.is_dir() or path.stat().st_size > 0):
            _check_writable(path)
        else:
            _create(path)
        tracking = _connect(path)
    with tracking.errors():
        _end_orphans(tracking.client)
    return tracking


def every(search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
    """All results of one of the client's search methods, page by page."""
    page = search(**arguments)
    yield from page
    while page.token:
        page = search(**arguments, page_token=page.token)
        yield from page


def _database_path(uri: str) -> Path:
    try:
        url = make_url(uri)
    except ArgumentError:
        url = None
    if url is None or url.get_backend_name() != "sqlite" or url.query or url.database in (None, "", ":memory:"):
        raise InvalidRequest(
            f"tracking store {uri!r} must be a SQLite file, written sqlite:///FILE; for example "
            f"{default_tracking_uri()}"
        )
    return Path(str(url.database)).absolute()


def _ignore_ambient_context() -> None:
    """Drop the MLflow settings that a client takes from the environment whatever arguments it is given.

    Its progress bars go too: artifacts are small files beside the store.
    """
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    if mlflow.get_active_model_id() is not None:
        mlflow.clear_active_model()
    os.environ.pop("MLFLOW_ENABLE_WORKSPACES", None)


@contextmanager
def _initialisation_lock(path: Path) -> Iterator[None]:
    """Hold the store's lock file: MLflow's schema migrations fail when two processes run them at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise Conflict(f"tracking store {path}: its folder must be writable ({error.strerror}); {_REMEDY}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_writable(path: Path) -> None:
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE paceline_write_check (x)")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise Conflict(f"tracking store {path}: the file must be writable ({error}); {_REMEDY}") from error
    except sqlite3.DatabaseError as error:
        raise CorruptFile(f"tracking store {path}: must be a SQLite database ({error}); {_REMEDY}") from error


def _create(path: Path) -> None:
    """Make the schema under another file name: a process killed meanwhile leaves no half of a store."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    _connect(unfinished)
    unfinished.replace(path)


def _connect(path: Path) -> TrackingStore:
    """A client makes the schema in a new file, and checks its version in any other."""
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    uri = f"sqlite:///{path}"
    with _one_line_errors(path):
        return TrackingStore(path=path, client=MlflowClient(tracking_uri=uri, registry_uri=uri))


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise PacelineError(f"tracking store {path}: {str(error).splitlines()[0]}") from error


def _end_orphans(client: MlflowClient) -> None:
    """Mark the runs whose process on this host is gone, as kill -9 leaves them, KILLED."""
    experiments = [experiment.experiment_id for experiment in every(client.search_experiments)]
    ours = f"attributes.status = 'RUNNING' AND tags.`{HOST}` = '{socket.gethostname()}'"
    running = list(every(client.search_runs, experiment_ids=experiments, filter_string=ours))
    for run in running:
        if owner_is_gone(run.data.tags):
            client.set_terminated(run.info.run_id, "KILLED")
