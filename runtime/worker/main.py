"""Entry of a worker process: execute the server's commands, one after the other."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2, types_pb2
from paceline.runtime import workloads
from paceline.runtime.convert import from_message, settings_from_message, to_message
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import PacelineError
from paceline.runtime.exchange.base import PEER_TIMEOUT
from paceline.runtime.launch.base import WorkerAddress
from paceline.runtime.mapping.levels import Level
from paceline.runtime.measure import StepReport
from paceline.runtime.membership import Membership
from paceline.runtime.session import Session
from paceline.runtime.snapshot.state import ReplicaState
from paceline.runtime.snapshot.store import SnapshotStore
from paceline.runtime.sync.reduction_server import serve_reductions
from paceline.runtime.worker.device import measure_device
from paceline.runtime.worker.flows import run_flows
from paceline.runtime.worker.gate import StepGate
from paceline.runtime.worker.groups import Groups
from paceline.runtime.worker.link import ControlLink
from paceline.runtime.workloads.base import Workload

EVALUATION_BATCH = 64
STATE_TAG = 1


def run_worker(address: WorkerAddress, *, threads: int) -> None:
    """Serve commands until the control stream ends, which ends the process."""
    torch.set_num_threads(threads)
    for path in address.workloads:
        workloads.register_class(path)
    gate = StepGate()
    executor = Executor(address, gate)
    link = ControlLink(address, gate, steps_done=executor.steps_done, sever=executor.sever)
    executor.serve(link)


def _seed(*parts: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]))


class Executor:
    """Holds this rank's replica of the current trial and does what the server asks."""

    def __init__(self, address: WorkerAddress, gate: StepGate) -> None:
        self._gate = gate
        self._groups = Groups(address.device, address.incarnation)
        self._session: Session | None = None
        self._workload: Workload | None = None
        self._store: SnapshotStore | None = None
        self._state_complete = False
        self._reduce: Callable[[], None] | None = None

    def steps_done(self) -> int:
        """Steps of the current trial that this rank has done."""
        return self._session.steps_done if self._session else 0

    def sever(self) -> None:
        """Fail whatever collective this rank is in."""
        self._groups.sever()

    def serve(self, link: ControlLink) -> None:
        """Answer commands forever."""
        while True:
            command = link.commands.get()
            try:
                self._execute(command, link)
            except Exception as error:
                link.flush()
                link.answer(command, failed=_failure(error))

    def _execute(self, command: control_pb2.Command, link: ControlLink) -> None:
        match command.WhichOneof("command"):
            case "build":
                self._build(command.build.plan)
                link.answer(command, built=self._built())
            case "run":
                if self._reduce is not None:
                    self._reduce()
                else:
                    self._train(link)
                link.answer(command, stopped=self._stopped())
            case "evaluate":
                if command.evaluate.settle:
                    self._current().settle()
                link.answer(command, evaluated=self._evaluate())
            case "snapshot":
                link.answer(command, snapshot=self._take_snapshot())
            case "measure":
                self._end_trial()
                group = self._groups.enter(command.measure.plan)
                profile = measure_device(group, command.measure.seconds)
                measured = control_pb2.WorkerMessage.Measured(
                    profile=to_message(profile, types_pb2.DeviceProfile),
                    kind="cpu",
                )
                link.answer(command, measured=measured)
            case "probe_links":
                probe = command.probe_links
                flows = [(flow.source, flow.target) for flow in probe.flows]
                measured_flows = run_flows(self._groups.current(), flows, probe.seconds, probe.chunk_bytes)
                link.answer(command, probed=control_pb2.WorkerMessage.LinksProbed(flows=measured_flows))
            case "abort":
                if self._session is not None:
                    self._state_complete = self._session.roll_back() and self._state_complete
                self._groups.leave()
                link.answer(command, stopped=self._stopped())

    def _train(self, link: ControlLink) -> None:
        """Train until the gate closes."""
        session, loss = self._current(), self._current_workload().loss
        session.set_out()
        last: StepReport | None = None
        while self._gate.may_begin(session.next_step):
            # The last report waits for what the way to the barrier adds to it.
            if last is not None:
                link.report(last)
            last = session.step(loss)
            if session.mode.lockstep:
                link.report(last)
                last = None
        last = session.arrive(self._gate.until, last)
        if last is not None:
            link.report(last)
        link.flush()

    def _current(self) -> Session:
        assert self._session is not None, "the server sends Build first"
        return self._session

    def _current_workload(self) -> Workload:
        assert self._workload is not None, "the server sends Build first"
        return self._workload

    def _stopped(self) -> control_pb2.WorkerMessage.Stopped:
        if self._session is None or not self._state_complete:
            return control_pb2.WorkerMessage.Stopped(holds_state=False)
        return control_pb2.WorkerMessage.Stopped(
            step=self._session.steps_done, cursor=self._session.cursor, holds_state=True
        )

    def _built(self) -> control_pb2.WorkerMessage.Built:
        if self._session is None:
            return control_pb2.WorkerMessage.Built()
        return control_pb2.WorkerMessage.Built(step=self._session.steps_done, cursor=self._session.cursor)

    def _build(self, plan: control_pb2.Plan) -> None:
        rank, ranks = self._groups.rank_in(plan), len(plan.shares)
        strategy = Strategy.of(settings_from_message(plan.strategy))
        self._reduce = None
        if rank >= ranks:
            self._end_trial()
            self._groups.enter(plan)
            self._reduce = partial(serve_reductions, strategy, self._groups.all_members, ranks)
            return
        if self._session is not None and not plan.keeps_group:
            self._session.suspend()
        if plan.members[rank].needs_state:
            self._begin_trial(plan, rank)
        group = self._groups.enter(plan)
        self._hand_over_state(plan, rank, group)
        tiers = tuple(Level(name=level.name, groups=tuple(level.groups)) for level in plan.levels)
        membership = Membership(
            generation=plan.generation,
            group=group,
            shares=tuple(plan.shares),
            store=self._groups.store,
            tiers=tiers,
            links=self._groups.all_members if ranks < len(plan.members) else None,
            subgroup=self._groups.subgroup,
        )
        self._current().join(membership, strategy, self._current_workload().loss)
        self._state_complete = True

    def _end_trial(self) -> None:
        if self._session is not None:
            self._session.leave()
        self._session, self._state_complete = None, False

    def _begin_trial(self, plan: control_pb2.Plan, rank: int) -> None:
        self._end_trial()
        self._workload = workloads.create(plan.workload)
        self._store = SnapshotStore(plan.snapshot_url)
        _seed(plan.seed)
        model = self._workload.model()
        optimizer = self._workload.optimizer(model.parameters())
        _seed(plan.seed, rank, 0)
        self._session = Session.attach(model, optimizer, self._workload, seed=plan.seed)
        if plan.HasField("snapshot"):
            snapshot = from_message(plan.snapshot, Snapshot)
            state = self._load_state(snapshot, rank % snapshot.world_size)
            self._session.restore(state, own=rank < snapshot.world_size)

    def _hand_over_state(self, plan: control_pb2.Plan, rank: int, group: dist.ProcessGroup) -> None:
        if not plan.HasField("source_rank"):
            return
        needy = [index for index, member in enumerate(plan.members) if member.needs_state]
        if rank == plan.source_rank:
            blob = torch.frombuffer(bytearray(self._current().suspended_state.to_bytes()), dtype=torch.uint8)
            for target in needy:
                for message in (torch.tensor([blob.numel()]), blob):
                    group.send([message], target, STATE_TAG).wait(PEER_TIMEOUT)
        elif rank in needy:
            size = torch.zeros(1, dtype=torch.int64)
            group.recv([size], plan.source_rank, STATE_TAG).wait(PEER_TIMEOUT)
            blob = torch.empty(int(size), dtype=torch.uint8)
            group.recv([blob], plan.source_rank, STATE_TAG).wait(PEER_TIMEOUT)
            self._current().restore(ReplicaState.from_bytes(blob.numpy().tobytes()), own=False)
            _seed(plan.seed, rank, self._current().cursor)

    def _load_state(self, snapshot: Snapshot, rank: int) -> ReplicaState:
        assert self._store is not None
        digests = {part.name: part.digest for part in snapshot.parts if part.rank == rank}
        numbers = self._store.get_json(digests.pop("numbers"))
        parts = {name: self._store.get_tensors(digest) for name, digest in digests.items()}
        return ReplicaState(parts=parts, numbers=numbers)

    def _take_snapshot(self) -> control_pb2.WorkerMessage.SnapshotWritten:
        session, store = self._current(), self._store
        assert store is not None
        state = session.capture()
        stored = {name: store.put_tensors(tensors) for name, tensors in state.parts.items()}
        stored["numbers"] = store.put_json(state.numbers)
        rank = session.membership.rank
        return control_pb2.WorkerMessage.SnapshotWritten(
            step=session.steps_done,
            cursor=session.cursor,
            parts=[
                types_pb2.SnapshotPart(rank=rank, name=name, digest=digest, size=size)
                for name, (digest, size) in stored.items()
            ],
        )

    @torch.no_grad()
    def _evaluate(self) -> control_pb2.WorkerMessage.Evaluated:
        session, workload = self._current(), self._current_workload()
        membership = session.membership
        mine = torch.arange(membership.rank, workload.heldout_samples, membership.world_size)
        total = 0.0
        with session.mode.averaged():
            session.model.eval()
            for indices in mine.split(EVALUATION_BATCH):
                batch = workload.batch(indices, heldout=True)
                total += float(workload.loss(session.model, batch)) * len(indices)
            session.model.train()
        return control_pb2.WorkerMessage.Evaluated(loss_sum=total, samples=len(mine))


def _failure(error: Exception) -> control_pb2.WorkerMessage.Failed:
    text = " ".join(str(error).split()) or "no message"
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
    message = text if isinstance(error, PacelineError) else f"{type(error).__name__}: {text}"
    return control_pb2.WorkerMessage.Failed(label="oom" if out_of_memory else "error", message=message)
