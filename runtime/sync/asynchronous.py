"""Parameter-server training with bounded staleness."""

import copy
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from paceline.runtime.compress.base import BlockCodec, Codec, Layout
from paceline.runtime.domain.domains import Boolean, Number
from paceline.runtime.domain.knobs import Rule
from paceline.runtime.exchange import BucketAverager, Exchange, Shard, Shards, StepMeter
from paceline.runtime.knobs import knob
from paceline.runtime.membership import Membership
from paceline.runtime.snapshot.state import load_optimizer_state, optimizer_state
from paceline.runtime.sync.base import (
    SYNC_MODES,
    Claim,
    LossFunction,
    Replica,
    StepOutcome,
    SyncConfig,
    SyncMode,
    average_in_place,
    copy_buffers,
    restore_buffers,
)


@dataclass(frozen=True, kw_only=True)
class AsynchronousConfig(SyncConfig):
    """Knobs of `async`."""

    staleness: int = knob("sync.staleness", Number(low=0, high=16, integer=True), default=4)
    """Updates that the weights behind a gradient may lack at most when it is applied, 0 to 16; 0 is synchronous."""
    damped: bool = knob("sync.damped", Boolean(), default=False)
    """Whether the learning rate of an update is divided by the mean staleness of its gradients where that is above 1
    (true or false)."""


@SYNC_MODES.register
class Asynchronous(SyncMode):
    """No rank waits for another unless it would get too far ahead.

    The parameters are sharded, by whole tensors, over the ranks. A rank that is free takes the next part of the sample
    stream, computes its gradient with the newest parameters it has, pushes that to the shards and goes on, pulling
    parameters meanwhile, as late as it can without waiting for them. A shard applies an update as soon as it has as
    many gradients as a step has parts, whoever made them and of whatever step, so a slow rank's come late and nobody
    else's. Half of `staleness`, rounded down, is how many updates late; the other half how many updates behind its step
    the weights may be that a rank begins with. So a gradient never misses more than `staleness` updates. Fast devices
    do more of the parts.

    Sources: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013;
    Dutta et al., "Slow and Stale Gradients Can Win the Race" (K-batch-async), arXiv:1803.01113; for the learning rate
    over the staleness, Zhang et al., "Staleness-aware Async-SGD", arXiv:1511.05950.

    The user's model and optimizer are the server's end: there each rank's optimizer steps the tensors of its shard
    alone, so whatever looks at all gradients at once, such as clipping by a global norm, sees those only. Forward and
    backward run on a copy. At every barrier all ranks have all weights, the optimizer's state included.
    """

    name = "async"
    Config: ClassVar[type[SyncConfig]] = AsynchronousConfig
    rules = (
        Rule(
            knob="compress.codec",
            values=("powersgd", "randomk"),
            other="sync.mode",
            allowed=("allreduce", "diloco", "hierarchical", "local_sgd", "reduction_server"),
            because="only ranks that send at the same time can agree on what they send",
        ),
    )
    replicas_equal = False
    exchanges_gradients = False
    lockstep = False

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        super().__init__(config, replica, averager)
        assert isinstance(config, AsynchronousConfig)
        assert isinstance(averager.exchange, Shards)
        self._staleness, self._damped = config.staleness, config.damped
        self._shards = averager.exchange
        self._membership = replica.membership
        replica.optimizer.zero_grad()
        self._copy = copy.deepcopy(replica.model)
        self._owners = _owners(replica.model, self._membership.world_size)
        self._layouts: list[Layout] = [()] * self._membership.world_size
        for name, parameter in replica.model.named_parameters():
            if name in self._owners:
                self._layouts[self._owners[name]] += ((name, parameter.shape),)
        self._base: int | None = None
        self._version = 0
        self._claimed: Claim | None = None
        self._busy_seconds = 0.0
        self._pushes: list[torch.futures.Future[Tensor]] = []
        self._pulling: Future[list[tuple[int, Tensor]]] | None = None
        self._under_way = False

    @classmethod
    def make_exchange(cls, config: SyncConfig, codec: Codec, membership: Membership) -> Exchange:
        """Shards, one at each rank."""
        assert isinstance(codec, BlockCodec)
        return Shards(codec, membership.group, membership.tiers)

    def serves(self, mode: type[SyncMode], config: SyncConfig, group: dist.ProcessGroup) -> bool:
        """No: the shards go with the averager."""
        return False

    @property
    def at_sync_point(self) -> bool:
        """Whether all ranks stand at a barrier."""
        return not self._under_way

    def claim(self, steps_done: int) -> Claim:
        """The next part that nobody has taken; without staleness always the rank's own."""
        size = self._membership.world_size
        if self._staleness == 0:
            done = steps_done if self._claimed is None else max(steps_done, self._claimed.step)
            self._claimed = Claim(done + 1, self._membership.rank)
        else:
            assert self._base is not None, "call set_out first"
            taken = self._membership.store.add(f"parts-{self._membership.generation}", 1) - 1
            self._claimed = Claim(self._base + taken // size + 1, taken % size)
        return self._claimed

    def _keep_shard(self, version: int) -> None:
        names = [name for name, _ in self._layouts[self._membership.rank]]
        by_name = dict(self.replica.model.named_parameters())
        own = [by_name[name] for name in names]

        checks = self.replica.loss_scale.checks

        @torch.no_grad()
        def update(mean: Tensor, staleness: float) -> Tensor:
            if checks and not mean.isfinite().all():
                return flat()
            for parameter, gradient in zip(own, mean.split([each.numel() for each in own]), strict=True):
                parameter.grad = gradient.view_as(parameter)
            groups = self.replica.optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate / max(1.0, staleness) if self._damped else rate
            self.replica.optimizer.step()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            self.replica.optimizer.zero_grad()
            return flat()

        def flat() -> Tensor:
            return torch.cat([parameter.detach().reshape(-1) for parameter in own]) if own else torch.empty(0)

        parts, lateness = self._membership.world_size, self._staleness // 2
        shard = Shard(flat(), parts=parts, lateness=lateness, version=version, update=update)
        self._shards.keep(self._layouts, shard)

    def set_out(self, steps_done: int) -> None:
        """Begin to serve this rank's shard."""
        if self._base is None:
            self._base = self._version = steps_done
            self._keep_shard(steps_done)
        self._shards.set_out()
        self._under_way = True

    def step(self, loss_function: LossFunction) -> StepOutcome:
        """One gradient on what was claimed last."""
        claim, began = self._claimed, time.perf_counter()
        assert claim is not None
        if self._pulling is not None:
            self._load(self._shards.result(self._pulling), self._copy)
        oldest = claim.step - 1 - (self._staleness + 1) // 2
        if self._version < oldest:
            self._load(self._shards.result(self._shards.pull(oldest)), self._copy)
        self._shards.settle(self._pushes)
        settled = time.perf_counter()
        if self._staleness:
            self._pulling = self._shards.pull_ahead(self._busy_seconds)
        self._copy.zero_grad()
        buffers, loss_scale = copy_buffers(self._copy), self.replica.loss_scale
        loss = loss_function(self._copy)
        (loss * (self._membership.scale_of(claim.part) * loss_scale.factor)).backward()
        self._shards.label(claim.step, claim.part, self._version)
        parameters = dict(self._copy.named_parameters())
        gradients = [
            torch.cat([_gradient(parameters[name]) for name, _ in layout]) for layout in self._layouts if layout
        ]
        for gradient in gradients:
            loss_scale.unscale(gradient)
        skipped = not loss_scale.admits(gradients)
        if skipped:
            restore_buffers(self._copy, buffers)
            # All shards are to leave the step out, not only those whose gradients are not finite.
            for gradient in gradients:
                gradient.fill_(math.nan)
        self._pushes = [
            self.averager.start(gradient, layout)
            for gradient, layout in zip(gradients, filter(None, self._layouts), strict=True)
        ]
        if skipped:
            self.averager.discard_step()
        self._count_served(self.averager.meter)
        self._busy_seconds = time.perf_counter() - settled
        staleness = claim.step - 1 - self._version
        return StepOutcome(
            loss=float(loss.detach()),
            exposed_seconds=settled - began,
            optimizer_seconds=0.0,
            staleness=staleness,
            skipped=skipped,
        )

    @torch.no_grad()
    def _load(self, replies: list[tuple[int, Tensor]], model: nn.Module) -> None:
        self._pulling = None
        parameters = dict(model.named_parameters())
        for layout, (_, values) in zip(self._layouts, replies, strict=True):
            pieces = values.split([shape.numel() for _, shape in layout])
            for (name, shape), piece in zip(layout, pieces, strict=True):
                parameters[name].copy_(piece.view(shape))
        self._version = min(version for layout, (version, _) in zip(self._layouts, replies, strict=True) if layout)

    def _count_served(self, meter: StepMeter) -> None:
        for tier, count in self._shards.served().wire_bytes.items():
            meter.add_bytes(tier, count)

    def arrive(self, step: int) -> StepMeter:
        """Wait until all gradients are applied, and give every rank all weights and the whole optimizer state."""
        self._shards.settle(self._pushes)
        if self._pulling is not None:
            self._shards.result(self._pulling)
        replies = self._shards.result(self._shards.pull(step))
        self._shards.arrive()
        for model in (self._copy, self.replica.model):
            self._load(replies, model)
        self._pushes = []
        meter = StepMeter()
        self._count_served(meter)
        group = self.averager.group
        buffers = list(self._copy.buffers())
        with torch.no_grad():
            if buffers:
                average_in_place(buffers, group)
            for buffer, mean in zip(self.replica.model.buffers(), buffers, strict=True):
                buffer.copy_(mean)
        names = {parameter: name for name, parameter in self.replica.model.named_parameters()}
        ordered = [names[parameter] for each in self.replica.optimizer.param_groups for parameter in each["params"]]
        _share_optimizer_state(self.replica.optimizer, [self._owners.get(name, 0) for name in ordered], group)
        self._under_way = False
        return meter


def _owners(model: nn.Module, ranks: int) -> dict[str, int]:
    """Which rank keeps which parameter: the largest first, each to the rank that has least."""
    load = [0] * ranks
    owners = {}
    parameters = [(name, each.numel()) for name, each in model.named_parameters() if each.requires_grad]
    for name, size in sorted(parameters, key=lambda each: -each[1]):
        owners[name] = load.index(min(load))
        load[owners[name]] += size
    return owners


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)


def _share_optimizer_state(optimizer: torch.optim.Optimizer, owners: Sequence[int], group: dist.ProcessGroup) -> None:
    """Give every rank the state of each parameter that its owner has; `owners` in the order of the optimizer."""
    tensors, rest = optimizer_state(optimizer)

    def owned(key: str) -> bool:
        return owners[int(key.partition(".")[0])] == group.rank()

    mine = {key: value.contiguous() for key, value in tensors.items() if owned(key)}
    scalars = json.dumps({key: value for key, value in rest["scalars"].items() if owned(key)})
    blob = torch.frombuffer(bytearray(save(mine, metadata={"scalars": scalars})), dtype=torch.uint8)
    shared_tensors: dict[str, Tensor] = {}
    shared_scalars: dict[str, object] = {}
    for raw in _gather_bytes(blob, group):
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        shared_tensors |= load(raw)
        shared_scalars |= json.loads(header["__metadata__"]["scalars"])
    load_optimizer_state(optimizer, shared_tensors, {**rest, "scalars": shared_scalars})


def _gather_bytes(own: Tensor, group: dist.ProcessGroup) -> list[bytes]:
    """What each rank has, uint8, by rank. All go around the ring at once; one broadcast per rank would cross slow links
    as often, but one after the other."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: own.numel()] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [each[: int(size)].numpy().tobytes() for each, size in zip(gathered, sizes, strict=True)]
