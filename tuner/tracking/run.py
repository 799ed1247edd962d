"""One MLflow run by its id: metrics in batches, tags, JSON artifacts, and an end whatever happens."""

import math
import time
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Any, ClassVar, Self

from mlflow.entities import Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from paceline.tuner.tracking.owner import owner_tags
from paceline.tuner.tracking.store import TrackingStore

FLUSH_METRICS = 500
FLUSH_SECONDS = 1.0

KIND = "paceline.kind"


class TrackedRun:
    """A run of this process, RUNNING from its construction on. Use it as a context manager, in one thread.

    On leaving, the run is FINISHED, or FAILED after an exception, or KILLED after what is no `Exception`
    (Ctrl-C, SIGTERM). After SIGKILL, it is marked KILLED when the store is next opened.
    """

    status_without_error: ClassVar[str] = "FINISHED"

    def __init__(
        self,
        tracking: TrackingStore,
        *,
        experiment_id: str,
        kind: str,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any] | None = None,
        documents: Mapping[str, Mapping[str, Any]] | None = None,
        parent_run_id: str = "",
    ) -> None:
        self.tracking = tracking
        self.experiment_id = experiment_id
        self._pending: list[Metric] = []
        self._flushed_at = monotonic()
        self._ended = False
        parent = {MLFLOW_PARENT_RUN_ID: parent_run_id} if parent_run_id else {}
        with tracking.errors():
            run = tracking.client.create_run(
                experiment_id, run_name=name, tags={**tags, **parent, **owner_tags(), KIND: kind}
            )
        self.run_id = str(run.info.run_id)
        try:
            with tracking.errors():
                texts = [Param(key, _text(value)) for key, value in (params or {}).items()]
                tracking.client.log_batch(self.run_id, params=texts)
            for path, document in (documents or {}).items():
                self.log_json(path, document)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def log(self, metrics: Mapping[str, float], *, step: int = 0) -> None:
        """Log metrics of one step, leaving out values that are not finite.

        They reach the store in batches: when `FLUSH_METRICS` are waiting or `FLUSH_SECONDS` have passed.
        """
        now = time.time_ns() // 1_000_000
        self._pending += [
            Metric(name, float(value), now, step) for name, value in metrics.items() if math.isfinite(value)
        ]
        if len(self._pending) >= FLUSH_METRICS or monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting metrics. Raises PacelineError when the store cannot; they are lost then."""
        pending, self._pending = self._pending, []
        with self.tracking.errors():
            self.tracking.client.log_batch(self.run_id, metrics=pending)
        self._flushed_at = monotonic()

    def tag(self, name: str, value: str) -> None:
        """Set a tag."""
        with self.tracking.errors():
            self.tracking.client.set_tag(self.run_id, name, value)

    def log_json(self, path: str, document: Mapping[str, Any]) -> None:
        """Store a JSON artifact."""
        with self.tracking.errors():
            self.tracking.client.log_dict(self.run_id, dict(document), path)

    def end(self, status: str) -> None:
        """Write what is waiting and set the final status: FINISHED, FAILED or KILLED."""
        self._ended = True
        try:
            self.flush()
        finally:
            with self.tracking.errors():
                self.tracking.client.set_terminated(self.run_id, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        if error_type is None:
            self.end(self.status_without_error)
        else:
            self.end("FAILED" if issubclass(error_type, Exception) else "KILLED")


def _text(value: Any) -> str:
    """A parameter as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
