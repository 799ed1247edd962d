"""Parameters averaged every few steps: what `local_sgd` and `diloco` have in common."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.runtime.compress.base import Codec, Layout
from paceline.runtime.domain.domains import Categorical, Number
from paceline.runtime.exchange import BucketAverager, Exchange, StepMeter
from paceline.runtime.knobs import knob
from paceline.runtime.membership import Membership
from paceline.runtime.sync.base import (
    Claim,
    LossFunction,
    Replica,
    StepOutcome,
    SyncConfig,
    SyncMode,
    average_in_place,
    copy_buffers,
    flat_exchange,
    step_optimizer,
    tiered_exchange,
    wait_seconds,
)
from paceline.runtime.sync.inner import InnerGroup
from paceline.runtime.sync.parts import LayeredConfig, Part, stagger, trainable


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(LayeredConfig):
    """Knobs of modes that average parameters."""

    period: int = knob("sync.period", Number(low=1, high=64, log=True, integer=True), default=8)
    """Local optimizer steps between two averagings of the parameters, 1 to 64."""
    fragments: int = knob("sync.fragments", Number(low=1, high=16, log=True, integer=True), default=1)
    """Fragments that the parameters are cut into, 1 to 16; their averagings are spread evenly over a period."""
    delay: int = knob("sync.delay", Number(low=0, high=16, integer=True), default=0)
    """Steps from the start of an averaging until its result is applied, 0 to 16, in which it overlaps compute; one less
    than the period at most."""
    inner: str = knob("sync.inner", Categorical(choices=("none", "tier")), default="none")
    """Who averages gradients every step besides: `none`, nobody; or `tier`, the ranks of each group of the outermost
    tier (a rack; where there are no racks, a node; on a single node, all ranks)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Averaging:
    """An exchange under way, or one whose result waits to be applied."""

    due: int
    """Step at whose end it is applied."""
    layout: Layout
    """What is exchanged."""
    started_from: tuple[Tensor, ...]
    """The parameters when it started; none where it is applied in the same step."""
    future: torch.futures.Future[Tensor]
    """The mean change, flat."""

    def changes(self) -> Sequence[Tensor]:
        """The mean change of each parameter, flat. Waits."""
        flat = self.future.wait()
        return torch.split(flat, [shape.numel() for _, shape in self.layout])


Take = Callable[[str, Tensor, Tensor], None]
"""Moves an anchor, in place, given its parameter's name and the mean change."""


class Periodic(SyncMode):
    """Every rank steps on its own samples; now and then the parameter changes are averaged.

    What travels is the change since the last averaging, so codecs see small numbers and error feedback applies as it
    does to gradients. The parameters as all ranks last agreed on them are the anchor; a mode says how the mean change
    moves it. Optimizer state stays local.

    With `fragments` the parameters are averaged in turns (Douillard et al., "Streaming DiLoCo", arXiv:2501.18512). With
    `delay` a rank goes on while a fragment travels, and keeps what it learns meanwhile: the parameters move by the new
    anchor minus what they were at the start (Zhu et al., "Delayed Gradient Averaging", NeurIPS 2021). Without it they
    become the new anchor, bit for bit. With `inner` the ranks of a group train synchronously, and groups instead of
    ranks go their own ways in between; the codec then applies between the groups only.
    """

    replicas_equal = False
    exchanges_gradients = False
    sends_changes = True

    def __init__(self, config: SyncConfig, replica: Replica, averager: BucketAverager) -> None:
        super().__init__(config, replica, averager)
        assert isinstance(config, PeriodicConfig)
        self._period, self._delay = config.period, config.delay
        self._parts = stagger(
            replica.model,
            period=config.period,
            layer_periods=config.layer_periods,
            fragments=config.fragments,
            bucket_bytes=self.bucket_bytes,
        )
        self._inner = InnerGroup(config, replica) if config.inner == "tier" else None
        self._parameters = dict(trainable(replica.model))
        self._anchors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._under_way: list[_Averaging] = []
        self._unsent_gradients: dict[str, Tensor] = {}
        self._step = 0
        self._equal = True

    @classmethod
    def make_exchange(cls, config: SyncConfig, codec: Codec, membership: Membership) -> Exchange:
        """Among all ranks alike; where the ranks of a group are equal, through the groups."""
        assert isinstance(config, PeriodicConfig)
        if config.inner == "tier" and membership.tiers:
            return tiered_exchange(codec, membership, membership.tiers[-1:], slow_only=True)
        return flat_exchange(codec, membership.group, membership.tiers)

    @abstractmethod
    def take(self, name: str, anchor: Tensor, change: Tensor) -> None:
        """Move the anchor of a parameter, in place, by what the mean change (anchor - parameters) says."""

    def claim(self, steps_done: int) -> Claim:
        """As any mode; which parts are averaged depends on the step."""
        self._step = steps_done + 1
        return super().claim(steps_done)

    @property
    def at_sync_point(self) -> bool:
        """Whether all parameters were averaged after the last step. Never, once some are in turns or late."""
        return self._equal

    def prepare(self, loss_function: LossFunction) -> None:
        """Settle the order of the inner group's buckets."""
        if self._inner is not None:
            self._inner.prepare(loss_function)

    def step(self, loss_function: LossFunction) -> StepOutcome:
        """One local step; averagings that are due begin and end behind it."""
        if self._inner is not None:
            outcome = self._inner.step(loss_function, self.replica, self.averager.meter, self._unsent_gradients)
        else:
            outcome = self._step_alone(loss_function)
        if not outcome.skipped:
            self._unsent_gradients = {}
        self._equal = False
        return replace(outcome, exposed_seconds=outcome.exposed_seconds + self._exchange())

    def _step_alone(self, loss_function: LossFunction) -> StepOutcome:
        model, loss_scale = self.replica.model, self.replica.loss_scale
        self.replica.optimizer.zero_grad()
        buffers = copy_buffers(model)
        loss = loss_function(model)
        (loss * loss_scale.factor).backward()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                loss_scale.unscale(parameter.grad)
                if name in self._unsent_gradients:
                    parameter.grad.add_(self._unsent_gradients[name].view_as(parameter))
        skipped, seconds = step_optimizer(self.replica, buffers)
        return StepOutcome(loss=float(loss.detach()), exposed_seconds=0.0, optimizer_seconds=seconds, skipped=skipped)

    def _exchange(self) -> float:
        """Apply and start what is due at the end of this step; for how long this rank waited, s."""
        starting = [part for part in self._parts if part.is_due(self._step)]
        names = {name for part in starting for bucket in part.buckets for name, _ in bucket.layout}
        # A switch may have shortened the period since: a parameter is in one averaging at a time.
        ending = [
            each for each in self._under_way if each.due <= self._step or any(name in names for name, _ in each.layout)
        ]
        seconds = self._finish(ending, self.take)
        if self._step % self._period == 0:
            seconds += self._average_buffers()
        at_once = [each for part in starting for each in self._start(part) if each.due == self._step]
        seconds += self._finish(at_once, self.take)
        self._equal = len(starting) == len(self._parts) and not self._under_way
        return seconds

    @property
    def _scale(self) -> float:
        """Factor on this rank's change so that the plain mean over all ranks weighs samples equally."""
        return self.replica.gradient_scale if self._inner is None else self._inner.change_scale(self.replica)

    @torch.no_grad()
    def _start(self, part: Part, *, delay: int | None = None) -> list[_Averaging]:
        delay = min(self._delay, part.period - 1) if delay is None else delay
        scale, started = self._scale, []
        for bucket in part.buckets:
            anchors = [self._anchors[name] for name, _ in bucket.layout]
            change = torch.cat(
                [(anchor - own).view(-1) for anchor, own in zip(anchors, bucket.parameters, strict=True)]
            )
            averaging = _Averaging(
                due=self._step + delay,
                layout=bucket.layout,
                started_from=tuple(own.detach().clone() for own in bucket.parameters) if delay else (),
                future=self.averager.start(change.mul_(scale), bucket.layout),
            )
            started.append(averaging)
        self._under_way += started
        return started

    @torch.no_grad()
    def _finish(self, averagings: Sequence[_Averaging], take: Take) -> float:
        """Apply these; for how long this rank waited, s."""
        _, seconds = wait_seconds([averaging.future for averaging in averagings])
        for averaging in averagings:
            for index, ((name, shape), change) in enumerate(zip(averaging.layout, averaging.changes(), strict=True)):
                anchor, own = self._anchors[name], self._parameters[name].data
                take(name, anchor, change.view(shape))
                if averaging.started_from:
                    own.add_(anchor - averaging.started_from[index])
                else:
                    own.copy_(anchor)
        self._under_way = [each for each in self._under_way if each not in averagings]
        return seconds

    @torch.no_grad()
    def _average_buffers(self) -> float:
        buffers = list(self.replica.model.buffers())
        if not buffers:
            return 0.0
        began = time.perf_counter()
        # What is under way may be a conversation, which must not be interrupted by a collective of another kind.
        self._land()
        average_in_place(buffers, self.averager.group)
        for buffer in buffers:
            count = self.averager.count_all_reduce if buffer.is_floating_point() else self.averager.count_broadcast
            count(buffer.numel() * buffer.element_size())
        return time.perf_counter() - began

    def _land(self) -> None:
        for averaging in self._under_way:
            averaging.future.wait()

    def arrive(self, step: int) -> StepMeter:
        """Wait for everything that is under way; it is applied when it is due."""
        self._land()
        # What a codec has learnt from it meanwhile must be in a snapshot that is taken here.
        self.averager.commit_step()
        return StepMeter()

    def settle(self) -> None:
        """Apply what is late and take the plain mean of the replicas if they differ."""
        self._finish(self._under_way, self.take)
        if not self._equal:
            self._average_buffers()
            for part in self._parts:
                self._start(part, delay=0)
            self._finish(self._under_way, _take_mean)
            self._equal = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average a copy, uncompressed, and put this rank's own weights back afterwards."""
        model = self.replica.model
        weights = [*(parameter.data for parameter in model.parameters()), *model.buffers()]
        own = [tensor.detach().clone() for tensor in weights]
        if not self._equal:
            with torch.no_grad():
                average_in_place(weights, self.averager.group)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, saved in zip(weights, own, strict=True):
                    tensor.copy_(saved)

    def take_over(self, unsent: dict[str, Tensor]) -> None:
        """Add what a mode before left unsent of its gradients to this rank's next gradient."""
        self._unsent_gradients = {name: gradient / self._scale for name, gradient in unsent.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """By name: the anchors, and of what has arrived but is not due yet the mean change, the parameters at the start
        and the step in which it is."""
        tensors = {f"anchor.{name}": anchor for name, anchor in self._anchors.items()}
        tensors |= {f"unsent.{name}": gradient for name, gradient in self._unsent_gradients.items()}
        late = {}
        for averaging in self._under_way:
            for (name, _), start, change in zip(
                averaging.layout, averaging.started_from, averaging.changes(), strict=True
            ):
                tensors |= {f"start.{name}": start, f"change.{name}": change}
                late[name] = averaging.due
        return tensors, {"equal": self._equal, **{f"due.{name}": late[name] for name in self._anchors if name in late}}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Take over what `state` returned, whatever the parts were then."""
        self._anchors = {name: tensors[f"anchor.{name}"].clone() for name in self._anchors}
        self._unsent_gradients = {
            name: tensors[f"unsent.{name}"].clone() for name in self._anchors if f"unsent.{name}" in tensors
        }
        self._equal = bool(numbers["equal"])
        self._under_way = []
        for name in self._anchors:
            if f"due.{name}" in numbers:
                start, future = tensors[f"start.{name}"].clone(), torch.futures.Future[Tensor]()
                future.set_result(tensors[f"change.{name}"].clone())
                averaging = _Averaging(
                    due=numbers[f"due.{name}"],
                    layout=((name, start.shape),),
                    started_from=(start,),
                    future=future,
                )
                self._under_way.append(averaging)

    def detach(self) -> None:
        """Release the group, and the inner one."""
        super().detach()
        if self._inner is not None:
            self._inner.detach()


def _take_mean(name: str, anchor: Tensor, change: Tensor) -> None:
    anchor.sub_(change)
