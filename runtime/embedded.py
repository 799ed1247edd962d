"""A runtime inside this process: `api.RuntimeAPI` without a socket for clients.

The workers are real processes all the same, and everything runs through the code that the server runs.
"""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import TrialEvent
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Trial, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.server.core import Runtime

T = TypeVar("T")


class EmbeddedRuntime:
    """Starts workers on construction and stops them on `close`; `RuntimeAPI` documents the methods."""

    def __init__(
        self,
        cluster: str = "local:4",
        *,
        store_url: str | None = None,
        workload_classes: tuple[str, ...] = (),
        profiles: Path | None = None,
        fresh_probe: bool = False,
    ) -> None:
        """`profiles`: folder of kept cluster profiles; without one, or with `fresh_probe`, the cluster is measured.

        Raises InvalidRequest before anything starts, and WorkerFailure when the workers do not come up.
        """
        self._runtime = Runtime(
            cluster,
            store_url=store_url,
            workload_classes=workload_classes,
            profiles=profiles,
            fresh_probe=fresh_probe,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="runtime")
        self._thread.start()
        try:
            self._await(self._runtime.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # On Ctrl-C and the like: what this thread no longer waits for must not go on.
            future.cancel()
            raise

    @property
    def probe_seconds(self) -> float | None:
        """How long measuring the cluster took, s; None where a kept profile was used."""
        return self._runtime.probe_seconds

    def describe_knobs(self) -> KnobSpace:
        """The knob space."""
        return self._runtime.space

    def describe_cluster(self) -> Cluster:
        """The measured cluster."""
        return self._runtime.cluster

    def list_workloads(self) -> tuple[WorkloadProfile, ...]:
        """All workload profiles."""
        return self._runtime.list_workloads()

    def run_trial(self, spec: TrialSpec, *, request_id: str = "") -> Iterator[TrialEvent]:
        """Run a trial; closing the iterator as the last listener cancels it."""
        entry = self._await(self._runtime.submit(spec, request_id or uuid.uuid4().hex))
        events = self._runtime.events(entry)
        try:
            while batch := self._await(_next(events)):
                yield from batch
        finally:
            self._await(events.aclose())

    def update_strategy(self, trial_id: str, strategy: Strategy, *, request_id: str = "") -> int:
        """Switch live; the generation from which the strategy is in force."""
        entry = self._runtime.entry(trial_id)
        return self._await(self._runtime.update_strategy(entry, strategy, request_id or uuid.uuid4().hex))

    def cancel_trial(self, trial_id: str) -> None:
        """End a trial."""
        self._loop.call_soon_threadsafe(self._runtime.cancel, self._runtime.entry(trial_id))

    def get_trial(self, trial_id: str) -> Trial:
        """One trial."""
        return self._runtime.trial(self._runtime.entry(trial_id))

    def list_trials(self) -> tuple[Trial, ...]:
        """All trials, oldest first."""
        return self._runtime.trials()

    def snapshot(self, trial_id: str, *, request_id: str = "") -> Snapshot:
        """Take a snapshot now."""
        entry = self._runtime.entry(trial_id)
        return self._await(self._runtime.snapshot(entry, request_id or uuid.uuid4().hex))

    def change_cluster(self, changes: Sequence[str], *, request_id: str = "") -> None:
        """Change the cluster now."""
        self._await(self._runtime.change_cluster(changes, request_id or uuid.uuid4().hex))

    def close(self) -> None:
        """Stop the workers and the event loop; idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._await(self._runtime.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _next(events: AsyncIterator[list[TrialEvent]]) -> list[TrialEvent]:
    return await anext(events, [])
