"""Ranks of one group of the outermost tier that train synchronously among themselves."""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.none import NoCodec
from paceline.runtime.exchange import BucketAverager, Ring, StepMeter
from paceline.runtime.knobs import NoKnobs
from paceline.runtime.mapping.levels import Level
from paceline.runtime.membership import Membership, destroy_groups
from paceline.runtime.snapshot.state import model_tensors, optimizer_state
from paceline.runtime.sync.allreduce import AllReduce, AllReduceConfig
from paceline.runtime.sync.base import LossFunction, Replica, StepOutcome, SyncConfig, average_in_place, differ


class InnerGroup:
    """Averages gradients every step among the ranks of this rank's group, uncompressed, so that they stay equal.

    The groups are those of the outermost tier; where there is none, all ranks are one group.
    """

    def __init__(self, config: SyncConfig, replica: Replica) -> None:
        """A collective of the group. Replicas of the group that differ are averaged, optimizer state included."""
        self._ranks = _group_of(replica.membership)
        self._group: dist.ProcessGroup | None = replica.membership.subgroup(self._ranks)
        moments, _ = optimizer_state(replica.optimizer)
        tensors = [*model_tensors(replica.model).values(), *moments.values()]
        # Where a mean changes nothing it still changes last bits.
        if differ(tensors, self._group):
            average_in_place(tensors, self._group)
        inside = self._inside(replica)
        averager = BucketAverager(Ring(NoCodec(NoKnobs()), self._group, inside.membership.tiers))
        self._sync = AllReduce(AllReduceConfig(bucket_mb=config.bucket_mb), inside, averager)

    def _inside(self, replica: Replica) -> Replica:
        membership, group = replica.membership, self._group
        assert group is not None, "the group was left"
        tiers = tuple(
            Level(name=level.name, groups=tuple(level.groups[rank] for rank in self._ranks))
            for level in membership.tiers
        )
        shares = tuple(membership.shares[rank] for rank in self._ranks)
        return replace(replica, membership=replace(membership, group=group, shares=shares, tiers=tiers, links=None))

    def change_scale(self, replica: Replica) -> float:
        """Factor on the group's parameter change so that the plain mean over all ranks weighs samples equally."""
        shares = replica.membership.shares
        own = sum(shares[rank] for rank in self._ranks)
        return own * len(shares) / (sum(shares) * len(self._ranks))

    def prepare(self, loss_function: LossFunction) -> None:
        """As `AllReduce.prepare`."""
        self._sync.prepare(loss_function)

    def step(
        self, loss_function: LossFunction, replica: Replica, meter: StepMeter, unsent: Mapping[str, Tensor]
    ) -> StepOutcome:
        """One synchronous step of the group, counted by the meter; `unsent` is added to this rank's gradient."""
        self._sync.replica = self._inside(replica)
        self._sync.averager.begin_step(measure_norms=False)
        self._sync.averager.meter = meter
        self._sync.averager.carry(unsent)
        outcome = self._sync.step(loss_function)
        self._sync.averager.commit_step()
        return outcome

    def detach(self) -> None:
        """Destroy the group."""
        self._sync.detach()
        groups = [self._group] if self._group is not None else []
        self._group = None
        destroy_groups(groups)


def _group_of(membership: Membership) -> list[int]:
    """The ranks of this rank's group, ascending."""
    if not membership.tiers:
        return list(range(membership.world_size))
    groups = membership.tiers[-1].groups
    return [rank for rank in range(membership.world_size) if groups[rank] == groups[membership.rank]]
