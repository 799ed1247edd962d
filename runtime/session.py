"""One rank of a training job: attach a model, an optimizer and data, then call `step`.

    session = Session.attach(model, optimizer, data, seed=0)
    session.join(Membership(...), strategy)
    session.step(loss)

Workers stand on exactly this; nothing in it knows about servers or launchers.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.runtime.compress import CODECS
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import StepSplit
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.knobs import config_from
from paceline.runtime.measure import StepReport
from paceline.runtime.membership import Membership
from paceline.runtime.precision import RECIPES, LossScale
from paceline.runtime.samples import SampleStream, rank_range
from paceline.runtime.snapshot.state import (
    ReplicaState,
    load_optimizer_state,
    model_tensors,
    optimizer_state,
)
from paceline.runtime.sync import SYNC_MODES
from paceline.runtime.sync.base import Claim, Replica, SyncMode, average_in_place

NOISE_EVERY = 10
"""Steps between two measurements of gradient norms: they cost two passes over the gradient."""

BatchLoss = Callable[[nn.Module, Any], Tensor]
"""Mean loss over the samples of a batch."""


class Data(Protocol):
    """Samples addressed by index. Every workload is one."""

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""

    @property
    def train_samples(self) -> int:
        """Size of the training set."""

    def batch(self, indices: Tensor) -> Any:
        """The samples with these indices, in this order."""


class Session:
    """A replica and its way through generations. All methods but `attach` are collectives of the membership."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, *, seed: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.steps_done = 0
        self.cursor = 0
        self._stream = SampleStream(data.train_samples, seed)
        self._mode: SyncMode | None = None
        self._membership: Membership | None = None
        self._agreed: ReplicaState | None = None
        self._restored: ReplicaState | None = None
        self._last_end: float | None = None
        self._claim: Claim | None = None
        self._loss_scale = LossScale()

    @classmethod
    def attach(cls, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, *, seed: int = 0) -> Self:
        """Begin at step 0. Models on all ranks must have been built under the same seed."""
        return cls(model, optimizer, data, seed=seed)

    @property
    def mode(self) -> SyncMode:
        """The sync mode in force."""
        assert self._mode is not None, "call join first"
        return self._mode

    @property
    def membership(self) -> Membership:
        """The place in the current generation."""
        assert self._membership is not None, "call join first"
        return self._membership

    def join(self, membership: Membership, strategy: Strategy, loss: BatchLoss) -> None:
        """Enter a generation: set up the sync mode, codec and precision of the strategy on its group.

        What was left unsent is added to the next exchange, whatever the codec. When the sync mode changes, replicas
        that drifted apart are averaged first, optimizer state included. Where one mode exchanges gradients and the
        other changes of parameters, unsent changes are made to the replicas before that, and unsent gradients are
        added to the next gradient.
        """
        mode_class = SYNC_MODES.get(str(strategy["sync.mode"]))
        codec_class = CODECS.get(str(strategy["compress.codec"]))
        config = config_from(mode_class.Config, strategy)
        self._precision = RECIPES.get(str(strategy["precision.compute"]))()
        self._loss_scale.configure(scales=self._precision.scales_loss, checks=strategy["precision.phases"] != "off")
        self._membership = membership
        codec = codec_class(config_from(codec_class.Config, strategy))
        averager = BucketAverager(mode_class.make_exchange(config, codec, membership))
        replica = Replica(
            model=self.model, optimizer=self.optimizer, membership=membership, loss_scale=self._loss_scale
        )
        if self._mode is not None and self._mode.serves(mode_class, config, membership.group):
            replaced = self._mode.averager
            averager.carry(replaced.residuals())
            if replaced.codec_name == averager.codec_name:
                averager.load_codec_state(*replaced.codec_state())
            replaced.release()
            self._mode.averager, self._mode.replica, self._claim = averager, replica, None
            return
        self.suspend()
        before = self._restored
        same_mode = before is not None and before.numbers["sync.mode"] == mode_class.name
        unsent = before.parts["residuals"] if before is not None else {}
        sent_changes = before is not None and SYNC_MODES.get(before.numbers["sync.mode"]).sends_changes
        if before is not None and not same_mode and not before.numbers["replicas_equal"]:
            if sent_changes and not mode_class.sends_changes:
                self._make_changes(unsent)
                unsent = {}
            self._merge(membership.group)
        mode = mode_class(config, replica, averager)
        if before is not None and same_mode:
            mode.load_state(before.parts["sync"], before.numbers["sync"])
        if sent_changes:
            averager.carry(unsent)
        else:
            mode.take_over(unsent)
        if before is not None and before.numbers["codec"] == averager.codec_name:
            averager.load_codec_state(before.parts["codec"], before.numbers["codec_steps"])
        self._membership = membership
        mode.prepare(lambda module: self._loss(module, self._batch(mode.claim(self.steps_done)), loss))
        # Only now: should a peer die on the way here, this rank can still go on from what it had.
        self._mode, self._restored, self._claim = mode, None, None
        # Not at any other barrier: between sync points, what a rank has learnt since the last would go with it.
        self._mark_sync_point()

    def suspend(self) -> None:
        """Leave the generation and release its process group, keeping everything that `join` goes on from."""
        if self._mode is not None:
            self._restored = self.capture()
            self.leave()

    def leave(self) -> None:
        """Release the process group. Must be called before a session is dropped: DDP and its comm hook hold each other
        through C++, where no garbage collector looks."""
        if self._mode is not None:
            self._mode.detach()
        self._mode = None
        self._membership = None
        self._last_end = None

    @property
    def suspended_state(self) -> ReplicaState:
        """What `join` will go on from."""
        assert self._restored is not None, "call suspend or restore first"
        return self._restored

    @torch.no_grad()
    def _merge(self, group: dist.ProcessGroup) -> None:
        moments, _ = optimizer_state(self.optimizer)
        average_in_place([*model_tensors(self.model).values(), *moments.values()], group)

    @torch.no_grad()
    def _make_changes(self, unsent: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, change in unsent.items():
            parameters[name].sub_(change.view_as(parameters[name]))

    def _range(self, claim: Claim) -> tuple[int, int]:
        """Half-open range of stream positions."""
        shares = self.membership.shares
        ahead = (claim.step - self.steps_done - 1) * sum(shares)
        return rank_range(self.cursor + ahead, shares, claim.part)

    def _batch(self, claim: Claim) -> Any:
        return self.data.batch(self._stream.indices(*self._range(claim)))

    @property
    def next_step(self) -> int:
        """The step that this rank trains on next."""
        if self._claim is None:
            self._claim = self.mode.claim(self.steps_done)
        return self._claim.step

    def _loss(self, module: nn.Module, batch: Any, loss: BatchLoss) -> Tensor:
        with self._precision.forward_context(next(module.parameters()).device.type):
            return loss(module, batch)

    def step(self, loss: BatchLoss) -> StepReport:
        """Train on a part of the next global batch. `loss` gets the module to call and the batch."""
        began = self._last_end or time.perf_counter()
        mode, membership = self.mode, self.membership
        averager = mode.averager
        claim, self._claim = self._claim or mode.claim(self.steps_done), None
        start, stop = self._range(claim)
        measure_norms = mode.exchanges_gradients and self.steps_done % NOISE_EVERY == 0
        averager.begin_step(measure_norms=measure_norms)
        loading = time.perf_counter()
        batch = self._batch(claim)
        data_wait = time.perf_counter() - loading
        loss_scale = self._loss_scale.factor
        with self._precision.step_context():
            outcome = mode.step(lambda module: self._loss(module, batch, loss))
        averager.commit_step()
        if mode.lockstep:
            self._advance(claim.step)
        self._last_end = time.perf_counter()
        seconds = self._last_end - began
        meter = averager.meter
        measured = measure_norms and not outcome.skipped
        # The bucket held the gradient times this factor.
        scale = mode.replica.gradient_scale
        return StepReport(
            step=claim.step,
            generation=membership.generation,
            rank=membership.rank,
            staleness=outcome.staleness,
            seconds=seconds,
            split=StepSplit(
                compute=max(0.0, seconds - outcome.exposed_seconds - data_wait),
                communication_exposed=outcome.exposed_seconds,
                communication_hidden=max(0.0, meter.busy_seconds() - outcome.exposed_seconds),
                data_wait=data_wait,
            ),
            optimizer_seconds=outcome.optimizer_seconds,
            loss=outcome.loss,
            sample_start=start,
            sample_stop=stop,
            wire_bytes=meter.wire_bytes,
            skipped=outcome.skipped,
            loss_scale=loss_scale,
            local_square_norm=meter.local_square_norm / scale**2 if measured else None,
            mean_square_norm=meter.mean_square_norm if measured else None,
        )

    def settle(self) -> None:
        """Bring the replicas together for good."""
        self.mode.averager.begin_step(measure_norms=False)
        self.mode.settle()
        self.mode.averager.commit_step()
        self._mark_sync_point()

    def _advance(self, step: int) -> None:
        self.cursor += (step - self.steps_done) * sum(self.membership.shares)
        self.steps_done = step
        self._mark_sync_point()

    def set_out(self) -> None:
        """Leave a barrier: the time until now does not count as training."""
        self._last_end = None
        self.mode.set_out(self.steps_done)

    def arrive(self, step: int, report: StepReport | None) -> StepReport | None:
        """Come to the barrier behind `step`; the report of this rank's last step, if it is still to be given, with what
        the way there took."""
        began = time.perf_counter()
        meter = self.mode.arrive(step)
        if not self.mode.lockstep:
            self._advance(step)
        if report is None:
            return None
        seconds, split = time.perf_counter() - began, report.split
        exposed = split.communication_exposed + seconds
        wire_bytes = Counter(report.wire_bytes)
        wire_bytes.update(meter.wire_bytes)
        return replace(
            report,
            seconds=report.seconds + seconds,
            split=replace(split, communication_exposed=exposed),
            wire_bytes=dict(wire_bytes),
        )

    def _mark_sync_point(self) -> None:
        # A mode whose replicas are always equal can go on from the live state; the others return to a sync point, as
        # between two of them a lost rank takes with it what it alone had learnt.
        if not self.mode.replicas_equal and self.mode.at_sync_point:
            self._agreed = self.capture().clone()

    def roll_back(self) -> bool:
        """Return to the last state that all ranks agreed on, after a step failed, and leave the generation.

        False if there is none: the replica was restored between two sync points, and none has come since.
        """
        drifted = self._restored is not None and not self._restored.numbers["replicas_equal"]
        if self._mode is not None:
            self.optimizer.zero_grad()
            drifted = not self._mode.replicas_equal
            if drifted:
                # What is under way has failed with the step, so there is no live state to keep.
                self.leave()
            else:
                self.suspend()
        if not drifted:
            return True
        if self._agreed is None:
            return False
        self.restore(self._agreed)
        return True

    def capture(self) -> ReplicaState:
        """This rank's state, sharing memory with the live tensors."""
        tensors, rest = optimizer_state(self.optimizer)
        sync_tensors, sync_numbers = self.mode.state()
        codec_tensors, codec_steps = self.mode.averager.codec_state()
        return ReplicaState(
            parts={
                "model": model_tensors(self.model),
                "optimizer": tensors,
                "sync": sync_tensors,
                "residuals": self.mode.averager.residuals(),
                "codec": codec_tensors,
                "rng": {"torch": torch.get_rng_state()},
            },
            numbers={
                "optimizer": rest,
                "sync": sync_numbers,
                "sync.mode": self.mode.name,
                "codec": self.mode.averager.codec_name,
                "codec_steps": codec_steps,
                "replicas_equal": self.mode.replicas_equal,
                "loss_scale": self._loss_scale.state(),
                "steps_done": self.steps_done,
                "cursor": self.cursor,
            },
        )

    def restore(self, state: ReplicaState, *, own: bool = True) -> None:
        """Take over a captured state before `join`.

        With `own` False the state is another rank's: its residuals and random numbers are not taken.
        """
        self.model.load_state_dict(state.parts["model"])
        load_optimizer_state(self.optimizer, state.parts["optimizer"], state.numbers["optimizer"])
        if own:
            torch.set_rng_state(state.parts["rng"]["torch"].clone())
        else:
            state = ReplicaState(parts={**state.parts, "residuals": {}}, numbers=state.numbers)
        self._loss_scale.load_state(state.numbers["loss_scale"])
        self.steps_done = state.numbers["steps_done"]
        self.cursor = state.numbers["cursor"]
        self._restored = state
