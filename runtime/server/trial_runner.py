"""Runs one trial: train to the next barrier, do what is due there, go on; recover when a worker is lost."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.convert import from_message
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import Evaluated, SnapshotTaken, StepDone, TrialEvent, TrialStarted
from paceline.runtime.domain.snapshot import Snapshot, SnapshotPart
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import HeldOutPoint, TrialSpec
from paceline.runtime.errors import Conflict
from paceline.runtime.server.balance import with_speeds
from paceline.runtime.server.fleet import Worker, WorkerError, WorkerLost, call_all
from paceline.runtime.server.generations import Generation, Generations, Standing
from paceline.runtime.server.guard import divergence
from paceline.runtime.server.link_use import LinkUse
from paceline.runtime.server.phases import PhaseWatch, trouble
from paceline.runtime.server.record import Record, Request
from paceline.runtime.server.steps import StepCollector
from paceline.runtime.server.timeline import Timeline
from paceline.runtime.server.watches import ClusterWatch
from paceline.runtime.snapshot.store import SnapshotStore

FOREVER = 2**62
"""A step that no trial reaches: train until something asks for a barrier."""

STALL_SECONDS = 60.0
"""A trial that completes no step for so long, or for 20 times as long as its longest step took, is given up: some
node is cut off. Frozen workers are found sooner, by their silence."""

MIN_LEG_SECONDS = 0.02
"""Shortest stretch between two barriers of a budget in seconds, so that rounding cannot make it stand still."""


class TrialEnded(Exception):
    """The trial cannot go on; carries the failure label."""

    def __init__(self, label: str, message: str) -> None:
        super().__init__(message)
        self.label = label


class TrialRunner:
    """One running trial. `run` is the only writer of its state; clients put requests into `requests`."""

    def __init__(
        self,
        trial_id: str,
        spec: TrialSpec,
        *,
        generations: Generations,
        cluster: Cluster,
        global_batch: int,
        store: SnapshotStore,
        start: Snapshot | None,
        start_loss: float | None,
        reference: Sequence[HeldOutPoint],
        emit: Callable[[TrialEvent], None],
        publish: Callable[[Cluster], None],
        probe_links: Callable[[Cluster, Sequence[Worker]], Awaitable[Cluster]],
    ) -> None:
        """`reference` is the held-out curve of the reference trial from the same start, empty where there is none.

        `probe_links` measures the links between workers, which stand at a barrier, anew.

        `publish` gets the cluster as training finds it, whenever that has changed.
        """
        self.trial_id = trial_id
        self.spec = spec
        self.record = Record(link_use=LinkUse(cluster.tiers))
        self.strategy = spec.strategy
        self.step = 0
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        self._generations = generations
        self._cluster = cluster
        self._global_batch = global_batch
        self._store = store
        self._start = start
        self._start_loss = start_loss
        self._reference = reference
        self._emit = emit
        self._publish = publish
        self._probe_links = probe_links
        self._watch: ClusterWatch | None = None
        self._last_step = 0.0
        self._generation: Generation | None = None
        self._collector: StepCollector | None = None
        self._first_step = start.step if start else 0
        self._phases = PhaseWatch(spec.strategy, begun=0, step=self._first_step)
        self._snapshots = 0
        self._wake = asyncio.Event()
        self._snapshot_step = 0
        self._stopped_at = 0.0
        self._settled = False
        self._timeline = Timeline(spec.timeline, generations.fleet.launcher)

    @property
    def generation(self) -> Generation:
        """The generation in force."""
        assert self._generation is not None, "the trial has not started"
        return self._generation

    async def run(self) -> None:
        """Run to the end of the budget. Raises TrialEnded with a label when the trial fails."""
        began = self._stopped_at = time.monotonic()
        try:
            await self._establish({}, self.strategy)
            if self._start_loss is not None:
                self._note_loss(self._start_loss)
            self.record.start_seconds = time.monotonic() - began
            while not self._settled:
                try:
                    await self._go_on()
                except (WorkerLost, WorkerError) as error:
                    await self._recover(error)
        except WorkerLost as error:
            raise TrialEnded("worker_lost", str(error)) from None
        except WorkerError as error:
            raise TrialEnded(error.label, f"{error.worker}: {error}") from None
        finally:
            self._refuse_requests()
            await self._timeline.end()

    async def _go_on(self) -> None:
        """Train to the next barrier and do what is due there."""
        if not self.record.curve:
            began = time.monotonic()
            await self._evaluate()
            self.record.start_seconds += time.monotonic() - began
        if not self._over():
            await self._train(self._next_barrier(), self._next_deadline())
        over = self._over()
        if over or self._evaluation_due():
            await self._evaluate(settle=over)
        every = self.spec.snapshot_every
        if every and self._steps_done % every == 0 and self._steps_done != self._snapshot_step:
            await self._take_snapshot()
        await self._serve_requests()
        if not over:
            await self._follow_the_cluster()
            if self._phases.due:
                await self._establish(self._standing(), self.strategy)
        self._settled = over

    @property
    def _steps_done(self) -> int:
        return self.step - self._first_step

    def _over(self) -> bool:
        budget, record = self.spec.budget, self.record
        reached = budget.target_loss is not None and any(point.loss <= budget.target_loss for point in record.curve)
        out_of_time = budget.seconds is not None and record.seconds >= budget.seconds
        return reached or out_of_time or (budget.steps is not None and self._steps_done >= budget.steps)

    def _evaluation_due(self) -> bool:
        done = len(self.record.curve) - 1
        budget, count = self.spec.budget, self.spec.evaluations
        by_steps = budget.steps is not None and self._steps_done * count >= (done + 1) * budget.steps
        by_time = budget.seconds is not None and self.record.seconds * count >= (done + 1) * budget.seconds
        return by_steps or by_time

    def _next_barrier(self) -> int:
        evaluations = len(self.record.curve) - 1
        budget, steps, every = self.spec.budget, [FOREVER], self.spec.snapshot_every
        if budget.steps is not None:
            steps.append(math.ceil((evaluations + 1) * budget.steps / self.spec.evaluations))
        if every:
            steps.append((self._steps_done // every + 1) * every)
        if self._phases.ends_at is not None:
            steps.append(self._phases.ends_at - self._first_step)
        return self._first_step + min(steps)

    def _next_deadline(self) -> float | None:
        evaluations = len(self.record.curve) - 1
        if self.spec.budget.seconds is None:
            return None
        due = self.spec.budget.seconds * (evaluations + 1) / self.spec.evaluations
        return max(MIN_LEG_SECONDS, due - self.record.seconds)

    async def _establish(self, standing: Mapping[Worker, Standing], strategy: Strategy) -> None:
        """Bring about a generation of the strategy, or of the stage that is due on the way to it."""
        is_new = strategy != self.strategy
        phases = PhaseWatch(strategy, begun=self.step, step=self.step) if is_new else self._phases
        generation = await self._generations.establish(
            trial_id=self.trial_id,
            spec=self.spec,
            strategy=phases.turn(),
            cluster=self._cluster,
            global_batch=self._global_batch,
            standing=standing,
            snapshot=self.record.snapshot or self._start,
        )
        if self._collector is not None:
            self._take_steps(self._collector.finish(generation.step))
        phases.enter(generation.step)
        self._generation, self._phases = generation, phases
        self.strategy = strategy
        self.step = generation.step
        self.record.generations += 1
        self.record.steps = [step for step in self.record.steps if step.step <= generation.step]
        self.record.curve = [point for point in self.record.curve if point.samples <= self.record.samples]
        self._collector = StepCollector(
            generation.number,
            generation.shares,
            step=generation.step,
            cursor=generation.cursor,
            on_reports=partial(self.record.link_use.add, generation.devices),
        )
        self._watch = ClusterWatch(generation, self._cluster, calibrates=self.record.generations == 1)
        for worker in generation.workers:
            worker.on_reports = self._collect(self._collector)
        self._emit(
            TrialStarted(
                trial_id=self.trial_id,
                generation=generation.number,
                step=generation.step,
                strategy=generation.strategy,
                devices=generation.devices,
                standstill_seconds=time.monotonic() - self._stopped_at,
            )
        )

    def _collect(self, collector: StepCollector) -> Callable[[Sequence[control_pb2.StepReport]], None]:
        def take(reports: Sequence[control_pb2.StepReport]) -> None:
            self._take_steps(collector.add(reports))

        return take

    def _take_steps(self, steps: Sequence[StepDone]) -> None:
        for step in steps:
            self.record.steps.append(step)
            self._last_step = time.monotonic()
            self._timeline.reach(step.step - self._first_step)
            self._emit(step)
            assert self._watch is not None
            moved, phase_due = self._watch.add(step), self._phases.add(step)
            if moved or phase_due or trouble(step):
                self.stop_soon()

    async def _follow_the_cluster(self) -> None:
        """Bring the cluster profile, and with it the batch shares, up to what training has found."""
        generation, watch = self.generation, self._watch
        assert watch is not None
        if watch.links_moved:
            self._cluster = await self._probe_links(self._cluster, generation.workers)
            watch.links_probed()
        elif watch.speeds:
            self._cluster = with_speeds(self._cluster, generation.devices, watch.speeds)
            await self._establish(self._standing(), self.strategy)
        else:
            return
        self._publish(self._cluster)

    def stop_soon(self) -> None:
        """Ask for a barrier as soon as possible."""
        self._wake.set()

    async def _train(self, until: int, seconds: float | None) -> None:
        await self._advance(until, seconds)
        if self.cancelled.is_set():
            raise TrialEnded("cancelled", "cancelled by a client")
        standing = [step for step in self.record.steps if step.generation == self.generation.number]
        if not self._phases.falls_back and (wrong := next(filter(None, map(trouble, standing)), None)):
            raise TrialEnded("diverged", wrong)

    async def _advance(self, until: int, seconds: float | None) -> None:
        """Train until the step, or until the seconds have passed or something asks for a barrier."""
        generation = self.generation
        self._timeline.begin()
        run = asyncio.create_task(call_all(generation.members, run=control_pb2.Command.Run(until_step=until)))
        wake = asyncio.create_task(self._wake.wait())
        stall = asyncio.create_task(self._wait_for_stall())
        try:
            await asyncio.wait({run, wake, stall}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not run.done() and not stall.done():
                await self._bring_to_barrier()
                await asyncio.wait({run, stall}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                await self._generations.abort(generation.members)
                raise TrialEnded(
                    "timeout",
                    f"no step was completed for a long time after {len(self.record.steps)}; a node may be cut off",
                )
            stopped = await run
        finally:
            self._stopped_at = time.monotonic()
            self._wake.clear()
            for task in (run, wake, stall):
                task.cancel()
            await asyncio.gather(run, wake, stall, return_exceptions=True)
        (self.step,) = {answer.stopped.step for answer in stopped[: len(generation.workers)]}

    async def _wait_for_stall(self) -> None:
        """Return once no step has been completed for too long."""
        self._last_step = time.monotonic()
        while True:
            longest = max((step.seconds for step in self.record.steps), default=0.0)
            left = self._last_step + max(STALL_SECONDS, 20 * longest) - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def _bring_to_barrier(self) -> None:
        """Stop all ranks before the same step: hold them, and let all run to the furthest step one has begun."""
        workers = self.generation.workers
        held = await call_all(workers, hold=control_pb2.Command.Hold())
        step = max(answer.held.next_step for answer in held)
        await call_all(workers, run_until=control_pb2.Command.RunUntil(step=step))

    async def _recover(self, error: WorkerLost | WorkerError) -> None:
        """Plan the next generation from what the survivors hold."""
        members = self.generation.members
        await self._generations.explain(error, members)
        standing = await self._generations.abort(members)
        if self.spec.on_worker_lost == "fail":
            raise WorkerLost("a worker was lost and the trial asked to end then")
        await self._establish(standing, self.strategy)

    async def _evaluate(self, *, settle: bool = False) -> None:
        command = control_pb2.Command.Evaluate(settle=settle)
        answers = await call_all(self.generation.workers, evaluate=command)
        samples = sum(answer.evaluated.samples for answer in answers)
        self._note_loss(sum(answer.evaluated.loss_sum for answer in answers) / samples)

    def _note_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrialEnded("diverged", f"the held-out loss is {loss} at step {self.step}")
        point = HeldOutPoint(seconds=self.record.seconds, samples=self.record.samples, loss=loss)
        self.record.curve.append(point)
        self._emit(Evaluated(step=self.step, point=point))
        if wrong := divergence(self.record.curve, self._reference):
            raise TrialEnded("diverged", wrong)

    async def _take_snapshot(self) -> Snapshot:
        began = time.monotonic()
        command = control_pb2.Command.TakeSnapshot()
        answers = await call_all(self.generation.workers, snapshot=command)
        self._snapshots += 1
        self._snapshot_step = self._steps_done
        snapshot = Snapshot(
            snapshot_id=f"{self.trial_id}-{self.step:08d}-{self._snapshots}",
            trial_id=self.trial_id,
            workload=self.spec.workload,
            step=answers[0].snapshot.step,
            cursor=answers[0].snapshot.cursor,
            world_size=len(answers),
            seed=self.spec.seed,
            strategy=dict(self.strategy),
            parts=tuple(from_message(part, SnapshotPart) for answer in answers for part in answer.snapshot.parts),
        )
        await asyncio.to_thread(self._store.commit, snapshot)
        self.record.snapshot = snapshot
        self.record.stalls.append(time.monotonic() - began)
        self._emit(SnapshotTaken(snapshot=snapshot))
        return snapshot

    async def _serve_requests(self) -> None:
        while not self.requests.empty():
            request = self.requests.get_nowait()
            try:
                request.done.set_result(await self._serve(request))
            except BaseException as error:
                # Whatever ends the trial here, the client must not wait for ever.
                request.done.set_exception(Conflict(f"trial {self.trial_id} could not do it: {error}"))
                raise

    async def _serve(self, request: Request) -> int | Snapshot:
        if request.strategy is None:
            return await self._take_snapshot()
        await self._establish(self._standing(), request.strategy)
        return self.generation.number

    def _standing(self) -> dict[Worker, Standing]:
        return {worker: Standing(step=self.step, cursor=self.generation.cursor) for worker in self.generation.workers}

    def _refuse_requests(self) -> None:
        while not self.requests.empty():
            self.requests.get_nowait().done.set_exception(Conflict(f"trial {self.trial_id} has ended"))
