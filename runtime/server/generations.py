"""The one way in which a job changes: from one generation to the next.

A generation is one agreed (members, placement, strategy, state source). A new trial on warm workers, a live switch
of strategy and the recovery from a lost worker all end in `establish`.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2, types_pb2
from paceline.runtime import mapping
from paceline.runtime.convert import strategy_to_message, to_message
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.errors import WorkerFailure
from paceline.runtime.server.fleet import Fleet, Worker, WorkerError, WorkerLost, call_all

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Generations in a row that may fail to come about before the trial is given up."""
ABORT_SECONDS = 9.0
"""How long a survivor may take to leave its collectives before it is killed as well."""
LOSS_SECONDS = 2.0
"""How long after a failed step the exit of a worker may still explain it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An agreed generation."""

    number: int
    """Never reused on a runtime."""
    workers: tuple[Worker, ...]
    """Members that train, by rank."""
    reducers: tuple[Worker, ...]
    """Members that only add up what the others send."""
    strategy: Strategy
    """Strategy in force."""
    shares: tuple[int, ...]
    """Samples of a global batch, by rank."""
    step: int
    """Steps done when it took over."""
    cursor: int
    """Samples consumed when it took over."""

    @property
    def members(self) -> tuple[Worker, ...]:
        """All, those that train first."""
        return (*self.workers, *self.reducers)

    @property
    def devices(self) -> tuple[int, ...]:
        """Device index, by rank."""
        return tuple(worker.device for worker in self.workers)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What state a worker that stands at a barrier holds."""

    step: int
    """Steps done."""
    cursor: int
    """Samples consumed."""


class Generations:
    """Numbers, plans and commits the generations of a runtime."""

    def __init__(self, fleet: Fleet, *, snapshot_url: str) -> None:
        self.fleet = fleet
        self._snapshot_url = snapshot_url
        self._number = 0
        # Members of the plan that made the newest groups, and how many of them train; whoever sat out since then may
        # know older ones.
        self._grouped: tuple[tuple[Worker, ...], int] = ((), 0)
        # The server hosts the rendezvous store, so that it outlives every worker.
        self._store = dist.TCPStore(fleet.launcher.host, 0, is_master=True, wait_for_workers=False)

    def plan(self, workers: Sequence[Worker], *, ranks: int) -> control_pb2.Plan:
        """A plan of the next number with nothing but members, of which the first `ranks` train, and store."""
        self._number += 1
        members = [control_pb2.Member(device=worker.device, incarnation=worker.incarnation) for worker in workers]
        keeps_group = self._grouped == (tuple(workers), ranks)
        self._grouped = tuple(workers), ranks
        return control_pb2.Plan(
            generation=self._number,
            keeps_group=keeps_group,
            members=members,
            store_host=self.fleet.launcher.host,
            store_port=self._store.port,
        )

    async def establish(
        self,
        *,
        trial_id: str,
        spec: TrialSpec,
        strategy: Strategy,
        cluster: Cluster,
        global_batch: int,
        standing: Mapping[Worker, Standing],
        snapshot: Snapshot | None,
    ) -> Generation:
        """Agree on the next generation and commit it.

        State comes from the member that is furthest on, if it is as far as `snapshot`; without one from that, without
        that from the seed.
        Workers lost on the way are replaced, unless the trial asked to fail then. Raises WorkerLost, WorkerError (a
        worker refused the plan) or WorkerFailure (too many attempts).
        """
        world_size = spec.world_size or cluster.size
        order = mapping.device_order(strategy, cluster, world_size)
        shares = mapping.batch_shares(strategy, cluster, order, global_batch)
        devices = (*order, *mapping.reducer_devices(strategy, cluster, order))
        for _ in range(MAX_ATTEMPTS):
            members = await self.fleet.complete(devices)
            workers = members[:world_size]
            oldest = snapshot.step if snapshot is not None else 0
            holders = {
                rank: standing[worker]
                for rank, worker in enumerate(workers)
                if worker in standing and standing[worker].step >= oldest
            }
            plan = self.plan(members, ranks=world_size)
            plan.trial_id, plan.workload, plan.seed = trial_id, spec.workload, spec.seed
            plan.strategy.CopyFrom(strategy_to_message(strategy))
            plan.shares.extend(shares)
            for level in mapping.tier_levels(cluster, devices):
                plan.levels.add(name=level.name, groups=level.groups)
            plan.snapshot_url = self._snapshot_url
            furthest = max((state.step for state in holders.values()), default=-1)
            for rank in range(world_size):
                plan.members[rank].needs_state = rank not in holders or holders[rank].step < furthest
            if holders and any(member.needs_state for member in plan.members):
                plan.source_rank = next(rank for rank, state in holders.items() if state.step == furthest)
            elif not holders and snapshot is not None:
                plan.snapshot.CopyFrom(to_message(snapshot, types_pb2.Snapshot))
            try:
                answers = await call_all(members, build=control_pb2.Command.Build(plan=plan))
            except (WorkerLost, WorkerError) as error:
                logger.warning("generation %d did not come about: %s", plan.generation, error)
                await self.explain(error, members)
                standing = await self.abort(members)
                if spec.on_worker_lost == "fail":
                    raise WorkerLost("a worker was lost") from error
                continue
            agreed = {(answer.built.step, answer.built.cursor) for answer in answers[:world_size]}
            if len(agreed) != 1:
                raise WorkerFailure(f"generation {plan.generation} holds different steps: {sorted(agreed)}")
            ((step, cursor),) = agreed
            return Generation(
                number=plan.generation,
                workers=workers,
                reducers=members[world_size:],
                strategy=strategy,
                shares=shares,
                step=step,
                cursor=cursor,
            )
        raise WorkerFailure(f"no generation came about in {MAX_ATTEMPTS} attempts; workers die while joining")

    async def explain(self, error: WorkerLost | WorkerError, workers: Sequence[Worker]) -> None:
        """Return if the loss of a worker explains the error and another may fare better; else abort all and raise.

        Raises the error itself, or WorkerError with the label of what ended a worker.
        """
        if isinstance(error, WorkerError):
            waits = [asyncio.create_task(worker.lost.wait()) for worker in workers]
            done, rest = await asyncio.wait(waits, timeout=LOSS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for wait in rest:
                wait.cancel()
            if not done:
                await self.abort(workers)
                raise error
        for worker in workers:
            if worker.cause_of_loss:
                await self.abort(workers)
                name = self.fleet.launcher.slots[worker.device].name
                raise WorkerError(worker, worker.cause_of_loss, f"{name} ended its worker: {worker.cause_of_loss}")

    async def abort(self, workers: Sequence[Worker]) -> dict[Worker, Standing]:
        """Make all survivors leave their groups; what each of them holds. Those that do not answer are killed."""
        self._grouped = (), 0

        async def leave(worker: Worker) -> control_pb2.WorkerMessage.Stopped | None:
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    return (await worker.call(abort=control_pb2.Command.Abort())).stopped
            except TimeoutError:
                self.fence(worker)
            except (WorkerLost, WorkerError):
                pass
            return None

        answers = await asyncio.gather(*(leave(worker) for worker in workers))
        return {
            worker: Standing(step=stopped.step, cursor=stopped.cursor)
            for worker, stopped in zip(workers, answers, strict=True)
            if stopped is not None and stopped.holds_state
        }

    def fence(self, worker: Worker) -> None:
        """Kill a worker and count it as lost at once, whatever its exit takes."""
        self.fleet.fence(worker)
        worker.mark_lost()
