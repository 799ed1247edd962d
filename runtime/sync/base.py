"""What a sync mode is."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.runtime.compress.base import BlockCodec, Codec, JointCodec
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.domain.domains import Number
from paceline.runtime.domain.knobs import Rule
from paceline.runtime.exchange import BucketAverager, Conversation, Exchange, Ring, StepMeter, Tiers, make_plan
from paceline.runtime.knobs import KnobConfig, NoKnobs, knob
from paceline.runtime.mapping.levels import Level
from paceline.runtime.membership import Membership
from paceline.runtime.precision.loss_scale import LossScale
from paceline.runtime.registry import Registry

CHUNK_BYTES = 2**21
"""Size of the pieces of a bucket that ranks sum up for each other, in fp32."""

CHUNK_MB = Number(low=0.0625, high=16.0, log=True)
"""Legal sizes of a chunk, MiB of fp32."""

LossFunction = Callable[[nn.Module], Tensor]
"""Computes the mean loss over this rank's samples, given the module to call."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig(KnobConfig):
    """Knobs that every sync mode has."""

    bucket_mb: float = knob("sync.bucket_mb", Number(low=0.25, high=100.0, log=True), default=25.0)
    """Size of the buckets in which gradients or parameters are exchanged, MiB, 0.25 to 100."""


class Claim(NamedTuple):
    """Which samples a rank trains on next."""

    step: int
    """Step whose global batch they are of; 1 for the first of the trial."""
    part: int
    """Which part of that batch: the share of the rank with this number."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One rank's copy of what is trained."""

    model: nn.Module
    """The user's model, unwrapped."""
    optimizer: torch.optim.Optimizer
    """The user's optimizer over its parameters."""
    membership: Membership
    """Its place among the others."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Factor on its loss, and judge of its gradients."""

    @property
    def gradient_scale(self) -> float:
        """What makes this rank's part of the global batch count as much as it is large; see `Membership.scale_of`."""
        return self.membership.scale_of(self.membership.rank)


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a sync mode did in one step."""

    loss: float
    """Mean loss over this rank's samples."""
    exposed_seconds: float
    """Time in which this rank only waited for an exchange, s."""
    optimizer_seconds: float
    """Time of the optimizer's step, which does not depend on the number of samples, s."""
    staleness: int = 0
    """Updates that the weights behind this rank's gradient lacked of those before its step. A gradient may be applied
    in a later or earlier update than its step's; on average over a run these are the updates that gradients missed."""
    skipped: bool = False
    """Whether the gradient was not finite, so that it is not applied; its samples count as used."""


class SyncMode(ABC):
    """Performs optimizer steps on one rank and keeps its replica together with the others."""

    name: ClassVar[str]
    Config: ClassVar[type[SyncConfig]]
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What it does not go together with."""
    replicas_equal: ClassVar[bool]
    """Whether all replicas have equal weights after every step."""
    lockstep: ClassVar[bool] = True
    """Whether all ranks do every step; if not, they are together at barriers only."""
    exchanges_gradients: ClassVar[bool]
    """Whether what is averaged are gradients, so that a gradient noise scale can be estimated."""
    sends_changes: ClassVar[bool] = False
    """Whether what is left unsent are changes of parameters (old minus new), not gradients."""

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        self.config = config
        self.replica = replica
        self.averager = averager
        self.bucket_bytes = int(config.bucket_mb * 2**20)

    @classmethod
    def make_exchange(cls, config: SyncConfig, codec: Codec, membership: Membership) -> Exchange:
        """What carries the buckets."""
        return flat_exchange(codec, membership.group, membership.tiers)

    def serves(self, mode: "type[SyncMode]", config: SyncConfig, group: dist.ProcessGroup) -> bool:
        """Whether this object can go on under a new strategy, with nothing but another averager and gradient scale.

        Setting up another is a collective, so only what all ranks have in common may decide.
        """
        return (type(self), self.config) == (mode, config) and self.averager.group is group

    def claim(self, steps_done: int) -> Claim:
        """What to train on next, when so many steps were done at the last barrier or, in lockstep, are done now."""
        return Claim(steps_done + 1, self.replica.membership.rank)

    def set_out(self, steps_done: int) -> None:
        """Every rank leaves a barrier, where so many steps are done."""

    @abstractmethod
    def step(self, loss_function: LossFunction) -> StepOutcome:
        """Forward, backward, exchange, optimizer step on what was claimed last. In lockstep a collective."""

    def arrive(self, step: int) -> StepMeter:
        """Every rank has come to the barrier behind `step`; what was exchanged on the way there. A collective."""
        return StepMeter()

    @property
    def at_sync_point(self) -> bool:
        """Whether all replicas are equal right now."""
        return True

    def prepare(self, loss_function: LossFunction) -> None:
        """Settle everything that the first step would otherwise do differently from later ones. A collective."""

    def settle(self) -> None:
        """Bring the replicas together for good. A collective."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the context the model has the averaged weights; afterwards its own again. A collective."""
        yield

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Tensors and numbers that a restored mode needs beside model and optimizer."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over what `state` returned, on the same rank."""

    def take_over(self, unsent: dict[str, Tensor]) -> None:
        """See to what a mode before this one left unsent: gradients, flat, by parameter name. Where what is left unsent
        are gradients here as well, the averager carries them."""
        self.averager.carry(unsent)

    def detach(self) -> None:
        """Release the process group and every hook on the model."""
        self.averager.release()


def flat_exchange(codec: Codec, group: dist.ProcessGroup, tiers: Sequence[Level]) -> Exchange:
    """An exchange among all ranks alike, in the form that suits the codec."""
    if isinstance(codec, JointCodec):
        return Conversation(codec, Ring(NoCodec(NoKnobs()), group, tiers))
    assert isinstance(codec, BlockCodec)
    if codec.sums_at_owners:
        plan = make_plan((), group.rank(), group.size())
        return Tiers(codec, group, tiers, plan, chunk_bytes=CHUNK_BYTES)
    return Ring(codec, group, tiers)


def tiered_exchange(
    codec: Codec,
    membership: Membership,
    levels: Sequence[Level],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    slow_only: bool,
) -> Exchange:
    """An exchange along levels of the network, the innermost first; see `Tiers`.

    Where those group nothing, a ring does the same with fewer messages, if the codec's payloads can be summed on the
    wire.
    """
    if isinstance(codec, JointCodec):
        plain = NoCodec(NoKnobs())
        carrier = tiered_exchange(plain, membership, levels, chunk_bytes=chunk_bytes, slow_only=slow_only)
        return Conversation(codec, carrier)
    assert isinstance(codec, BlockCodec)
    plan = make_plan(levels, membership.rank, membership.world_size)
    if plan.levels == 1 and codec.linear:
        return Ring(codec, membership.group, membership.tiers)
    return Tiers(codec, membership.group, membership.tiers, plan, chunk_bytes=chunk_bytes, slow_only=slow_only)


def copy_buffers(model: nn.Module) -> list[Tensor]:
    """What `restore_buffers` needs to undo what a forward pass does to a model's buffers."""
    return [buffer.clone() for buffer in model.buffers()]


@torch.no_grad()
def restore_buffers(model: nn.Module, copies: Sequence[Tensor]) -> None:
    """Give a model's buffers the values back that they had."""
    for buffer, copy in zip(model.buffers(), copies, strict=True):
        buffer.copy_(copy)


def step_optimizer(replica: Replica, buffers: Sequence[Tensor]) -> tuple[bool, float]:
    """Step the optimizer if the gradients are finite; if not, restore the buffers, as the forward pass spoilt them too.

    Whether the step was skipped, and its time, s.
    """
    began = time.perf_counter()
    gradients = (each.grad for each in replica.model.parameters() if each.grad is not None)
    skipped = not replica.loss_scale.admits(gradients)
    if skipped:
        restore_buffers(replica.model, buffers)
    else:
        replica.optimizer.step()
    return skipped, time.perf_counter() - began


def wait_seconds(futures: list[torch.futures.Future[Tensor]]) -> tuple[list[Tensor], float]:
    """Wait for all futures; their values, and for how long, s."""
    began = time.perf_counter()
    values = [future.wait() for future in futures]
    return values, time.perf_counter() - began


def differ(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> bool:
    """Whether any bit of the tensors differs between the ranks of a group. A collective."""
    digest = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    own = torch.tensor([int.from_bytes(digest.digest())])
    others = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(others, own, group=group)
    return any(not torch.equal(own, other) for other in others)


def average_in_place(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by its mean over the group if it is floating point, else by rank 0's. A collective."""
    works = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        # One exchange for all: a model has many small tensors, and each would cost a round of latency.
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        if dtype.is_floating_point:
            work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
        else:
            work = dist.broadcast(flat, group_src=0, group=group, async_op=True)
        works.append((work, same, flat))
    # Nothing is changed before all is there: a peer may die in between.
    for work, _, _ in works:
        work.wait()
    for _, same, flat in works:
        for tensor, mean in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(mean.view_as(tensor))


SYNC_MODES: Registry[type[SyncMode]] = Registry(
    "sync mode", package="paceline.runtime.sync", entry_point_group="paceline.sync"
)
