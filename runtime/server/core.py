"""The runtime itself: validates requests, queues trials, runs them one at a time on the warm workers."""

import asyncio
import contextlib
import logging
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.runtime import launch, mapping, precision, workloads
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import TrialEvent, TrialFailed, TrialFinished
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Trial, TrialResult, TrialSpec
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import Busy, Conflict, InvalidRequest, NotFound, WorkerFailure
from paceline.runtime.knobs import knob_space
from paceline.runtime.probe.cluster import probe_cluster, probe_links_again
from paceline.runtime.probe.store import ProfileStore
from paceline.runtime.server.fleet import Fleet
from paceline.runtime.server.generations import Generations
from paceline.runtime.server.phases import stages
from paceline.runtime.server.record import Record, Request
from paceline.runtime.server.results import trial_result
from paceline.runtime.server.trial_runner import TrialEnded, TrialRunner
from paceline.runtime.snapshot.store import SnapshotStore

MAX_QUEUED_TRIALS = 64

logger = logging.getLogger(__name__)


class EventLog:
    """The events of one trial, for any number of readers, each from the first event on."""

    def __init__(self) -> None:
        self._events: list[TrialEvent] = []
        self._grown = asyncio.Event()

    def append(self, event: TrialEvent) -> None:
        """Add an event and wake all readers."""
        self._events.append(event)
        self._grown.set()
        self._grown = asyncio.Event()

    async def read(self) -> AsyncIterator[list[TrialEvent]]:
        """All events until the trial has ended, as many at a time as there are."""
        position = 0
        while True:
            while position == len(self._events):
                await self._grown.wait()
            batch = self._events[position:]
            position += len(batch)
            yield batch
            if isinstance(batch[-1], TrialFinished | TrialFailed):
                return


@dataclass
class Entry:
    """A trial that this runtime has accepted."""

    trial_id: str
    request_id: str
    spec: TrialSpec
    start: Snapshot | None
    state: str = "queued"
    log: EventLog = field(default_factory=EventLog)
    runner: TrialRunner | None = None
    result: TrialResult | None = None
    subscribers: int = 0
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        """Whether the last event is there."""
        return self.result is not None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to a running trial, kept so that the same request id is never served twice."""

    trial_id: str
    strategy: Strategy | None
    answer: "asyncio.Future[int | Snapshot]"


class Runtime:
    """One cluster's runtime. All methods run on one event loop; `api.RuntimeAPI` says what they do."""

    def __init__(
        self,
        cluster: str,
        *,
        store_url: str | None = None,
        workload_classes: tuple[str, ...] = (),
        profiles: Path | None = None,
        fresh_probe: bool = False,
    ) -> None:
        """`profiles`: folder of kept cluster profiles; without one, or with `fresh_probe`, the cluster is measured."""
        self.launcher = launch.create(cluster)
        self._profiles = ProfileStore(profiles) if profiles else None
        self._fresh_probe = fresh_probe
        self.probe_seconds: float | None = None
        for path in workload_classes:
            workloads.register_class(path)
        self._temporary = None if store_url else tempfile.TemporaryDirectory(prefix="paceline-")
        self._store_url = self._temporary.name if self._temporary else str(store_url)
        self.store = SnapshotStore(self._store_url)
        self.space: KnobSpace = knob_space()
        self._fleet = Fleet(self.launcher, workloads=workload_classes)
        self._generations: Generations | None = None
        self._cluster: Cluster | None = None
        self._entries: dict[str, Entry] = {}
        self._by_request: dict[str, str] = {}
        self._answers: dict[str, Asked] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._queue: asyncio.Queue[Entry] = asyncio.Queue()
        self._runs: asyncio.Task[None] | None = None
        self._start_losses: dict[tuple[str, int, str], float] = {}

    async def start(self) -> None:
        """Start and measure the workers. Raises WorkerFailure."""
        await self._fleet.start()
        self._generations = Generations(self._fleet, snapshot_url=self._store_url)
        self._cluster = await self._measure()
        self._runs = asyncio.create_task(self._run_queue())

    async def close(self) -> None:
        """Cancel everything, stop the workers, remove what was temporary."""
        if self._runs is not None:
            self._runs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runs
        for entry in self._entries.values():
            if not entry.ended:
                self._end(entry, "cancelled", "the runtime was closed")
        await self._fleet.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _measure(self) -> Cluster:
        assert self._generations is not None
        workers = await self._fleet.complete(range(len(self.launcher.slots)))
        if self._profiles and not self._fresh_probe and (kept := self._profiles.load(self.launcher)):
            return kept
        began = time.perf_counter()
        cluster = await probe_cluster(self.launcher, workers, self._generations.plan(workers, ranks=len(workers)))
        self.probe_seconds = time.perf_counter() - began
        self._keep(cluster)
        return cluster

    def _publish(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _publish_and_keep(self, cluster: Cluster) -> None:
        self._publish(cluster)
        self._keep(cluster)

    def _keep(self, cluster: Cluster) -> None:
        # The next start does not find the changes that were made to this cluster by command.
        if self._profiles and not self._changes:
            self._profiles.save(self.launcher, cluster)

    @property
    def cluster(self) -> Cluster:
        """Devices and links as last measured: by a probe, and by training since."""
        assert self._cluster is not None, "the runtime has not started"
        return self._cluster

    def list_workloads(self) -> tuple[WorkloadProfile, ...]:
        """Every registered workload and variant. Blocking: the first call may load data."""
        return tuple(workloads.create(reference).profile(reference) for reference in workloads.references())

    def complete_strategy(self, spec: TrialSpec, settings: Mapping[str, KnobValue]) -> Strategy:
        """Complete a client's settings with defaults. Raises UnknownName or IllegalStrategy."""
        return self.space.strategy(settings, world_size=spec.world_size or self.cluster.size)

    async def submit(self, spec: TrialSpec, request_id: str) -> Entry:
        """Accept a trial, or return the one that this request made before. Raises before anything starts."""
        if known := self._by_request.get(request_id):
            return self._entries[known]
        start = await asyncio.to_thread(self._check, spec)
        # While the check ran, the same request may have come in once more.
        if known := self._by_request.get(request_id):
            return self._entries[known]
        if self._queue.qsize() >= MAX_QUEUED_TRIALS:
            raise Busy(f"{MAX_QUEUED_TRIALS} trials are queued already; try again when one has ended")
        entry = Entry(trial_id=uuid.uuid4().hex[:12], request_id=request_id, spec=spec, start=start)
        self._entries[entry.trial_id] = entry
        self._by_request[request_id] = entry.trial_id
        self._queue.put_nowait(entry)
        return entry

    def _check(self, spec: TrialSpec) -> Snapshot | None:
        """Refuse what cannot run; the snapshot it starts from."""
        workload = workloads.create(spec.workload)
        if spec.world_size > self.cluster.size:
            raise InvalidRequest(
                f"world size {spec.world_size} is larger than cluster {self.cluster.name}; "
                f"use at most {self.cluster.size}"
            )
        self._check_strategy(spec, spec.strategy, workload.global_batch)
        self.launcher.check_changes([timed.change for timed in spec.timeline])
        if not spec.start_snapshot:
            return None
        snapshot = self.store.load(spec.start_snapshot)
        if snapshot.workload != spec.workload:
            raise InvalidRequest(
                f"snapshot {spec.start_snapshot} is of workload {snapshot.workload}, not of {spec.workload}"
            )
        return snapshot

    def _check_strategy(self, spec: TrialSpec, strategy: Strategy, global_batch: int) -> None:
        world_size = spec.world_size or self.cluster.size
        self.space.strategy(strategy, world_size=world_size)
        order = mapping.device_order(strategy, self.cluster, world_size)
        # Every stage on the way to the strategy must be legal as well.
        stages(strategy)
        precision.check_devices(strategy, [self.cluster.devices[device].kind for device in order])
        mapping.batch_shares(strategy, self.cluster, order, global_batch)
        mapping.reducer_devices(strategy, self.cluster, order)

    def entry(self, trial_id: str) -> Entry:
        """The trial of this id. Raises NotFound."""
        if trial_id not in self._entries:
            raise NotFound(f"no trial {trial_id!r} on this runtime; list_trials names {len(self._entries)}")
        return self._entries[trial_id]

    def trial(self, entry: Entry) -> Trial:
        """Describe an accepted trial."""
        runner = entry.runner
        generation = runner.record.generations and runner.generation.number if runner else 0
        return Trial(
            trial_id=entry.trial_id,
            request_id=entry.request_id,
            spec=entry.spec,
            state=entry.state,
            step=runner.step if runner else 0,
            generation=generation,
            result=entry.result,
        )

    def trials(self) -> tuple[Trial, ...]:
        """All accepted trials, oldest first."""
        return tuple(self.trial(entry) for entry in self._entries.values())

    async def events(self, entry: Entry) -> AsyncGenerator[list[TrialEvent]]:
        """All events of a trial from its first, as many at a time as there are, until it has ended.

        Leaving as the last listener cancels it.
        """
        entry.subscribers += 1
        try:
            async for batch in entry.log.read():
                yield batch
        finally:
            entry.subscribers -= 1
            if entry.subscribers == 0 and not entry.ended:
                self.cancel(entry)

    def cancel(self, entry: Entry) -> None:
        """End a trial at its next step boundary, or before it starts."""
        entry.cancelled = True
        if entry.runner is not None:
            entry.runner.cancelled.set()
            entry.runner.stop_soon()

    async def update_strategy(self, entry: Entry, strategy: Strategy, request_id: str) -> int:
        """Switch live; the generation that brings the new strategy."""
        if request_id not in self._answers:
            global_batch = workloads.create(entry.spec.workload).global_batch
            self._check_strategy(entry.spec, strategy, global_batch)
        generation = await self._ask(entry, strategy, request_id)
        assert isinstance(generation, int)
        return generation

    async def snapshot(self, entry: Entry, request_id: str) -> Snapshot:
        """Take a snapshot at the next step boundary."""
        snapshot = await self._ask(entry, None, request_id)
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def change_cluster(self, changes: Sequence[str], request_id: str) -> None:
        """Change what the cluster can do, whatever runs."""
        self.launcher.check_changes(changes)
        if request_id not in self._changes:
            self._changes[request_id] = asyncio.create_task(self.launcher.change(tuple(changes)))
        await asyncio.shield(self._changes[request_id])

    async def _ask(self, entry: Entry, strategy: Strategy | None, request_id: str) -> int | Snapshot:
        asked = self._answers.get(request_id)
        if asked is None:
            if entry.runner is None or entry.ended:
                raise Conflict(f"trial {entry.trial_id} is {entry.state}, not running")
            asked = self._answers[request_id] = Asked(
                trial_id=entry.trial_id, strategy=strategy, answer=asyncio.get_running_loop().create_future()
            )
            entry.runner.requests.put_nowait(Request(strategy=strategy, done=asked.answer))
            entry.runner.stop_soon()
        elif (asked.trial_id, asked.strategy) != (entry.trial_id, strategy):
            raise Conflict(f"request id {request_id!r} was used for another request; choose a new one")
        # Shielded: a client that gives up must not take the answer away from one that asks again.
        return await asyncio.shield(asked.answer)

    async def _run_queue(self) -> None:
        while True:
            entry = await self._queue.get()
            await self._run(entry)

    async def _run(self, entry: Entry) -> None:
        spec = entry.spec
        key = (spec.workload, spec.seed, spec.start_snapshot)
        assert self._generations is not None
        reference = self._reference(spec)
        runner = entry.runner = TrialRunner(
            entry.trial_id,
            spec,
            generations=self._generations,
            cluster=self.cluster,
            global_batch=workloads.create(spec.workload).global_batch,
            store=self.store,
            start=entry.start,
            start_loss=self._start_losses.get(key),
            reference=reference.heldout_curve if reference else (),
            emit=entry.log.append,
            # Changes of a timeline are undone, so what the trial finds of them holds only as long as it runs.
            publish=self._publish if spec.timeline else self._publish_and_keep,
            probe_links=probe_links_again,
        )
        entry.state = "running"
        found = self.cluster
        failure, message = None, ""
        try:
            if entry.cancelled:
                raise TrialEnded("cancelled", "cancelled by a client")
            await runner.run()
        except TrialEnded as ended:
            failure, message = ended.label, str(ended)
        except WorkerFailure as error:
            failure, message = "worker_lost", str(error)
        except Exception as error:
            # A defect of ours must cost one trial, not the queue behind it.
            logger.exception("trial %s ended by a defect", entry.trial_id)
            failure, message = "error", f"{type(error).__name__}: {error}"
        if spec.timeline:
            self._publish(found)
        if runner.record.curve:
            self._start_losses.setdefault(key, runner.record.curve[0].loss)
        self._end(entry, failure, message)

    def _end(self, entry: Entry, failure: str | None, message: str) -> None:
        entry.result = trial_result(
            entry.spec,
            entry.runner.record if entry.runner else Record(),
            strategy=entry.runner.strategy if entry.runner else entry.spec.strategy,
            cluster=self.cluster,
            reference=self._reference(entry.spec),
            peak_memory_bytes=self._fleet.resident_bytes,
            failure=failure,
            message=message,
        )
        entry.state = "failed" if failure else "finished"
        entry.log.append(TrialFailed(result=entry.result) if failure else TrialFinished(result=entry.result))

    def _reference(self, spec: TrialSpec) -> TrialResult | None:
        """The newest finished trial of the default strategy from the same start."""
        same = [
            entry.result
            for entry in self._entries.values()
            if entry.state == "finished"
            and entry.result is not None
            and entry.result.strategy == self.space.default
            and _start(entry.spec) == _start(spec)
        ]
        return same[-1] if same else None


def _start(spec: TrialSpec) -> tuple[object, ...]:
    """What two trials must share for their held-out curves to be comparable."""
    return spec.workload, spec.seed, spec.start_snapshot, spec.world_size
