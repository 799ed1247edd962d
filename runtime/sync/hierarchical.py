"""Gradients averaged every step, tier by tier."""

from dataclasses import dataclass

from paceline.runtime.compress.base import BlockCodec, Codec, JointCodec
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.domain.domains import Categorical, Number, PerRank
from paceline.runtime.exchange import Conversation, Exchange, Tiers
from paceline.runtime.knobs import NoKnobs, knob
from paceline.runtime.mapping.levels import grouping
from paceline.runtime.membership import Membership
from paceline.runtime.sync.allreduce import AllReduce
from paceline.runtime.sync.base import SYNC_MODES, SyncConfig


@dataclass(frozen=True, kw_only=True)
class HierarchicalConfig(SyncConfig):
    """Knobs of `hierarchical`."""

    groups: str = knob("mapping.groups", PerRank(named=("tiers",), permutation=False), default="tiers")
    """Ranks that exchange among themselves first: `tiers`, those of a node, then of a rack, as measured; or a positive
    group number per rank."""
    compressed_tier: str = knob("compress.tier", Categorical(choices=("all", "slow")), default="all")
    """Where the codec applies: at all levels, or at the slow one alone, which joins the outermost groups."""
    chunk_mb: float = knob("sync.chunk_mb", Number(low=0.0625, high=16.0, log=True), default=0.5)
    """Size of the chunks of a bucket that follow each other from level to level, MiB of fp32, 0.0625 to 16."""


@SYNC_MODES.register
class Hierarchical(AllReduce):
    """Synchronous data parallelism whose exchange follows the tiers of the network.

    Every bucket is reduced inside the innermost groups, then across them, and so on outwards and back; slow links thus
    carry only what is summed already, and chunks of a bucket keep all tiers busy at once. Overlaps the backward pass as
    `allreduce` does. Sources: Cho et al., "BlueConnect", SysML 2019; Thakur et al., "Optimization of Collective
    Communication Operations in MPICH", IJHPCA 19, 2005.
    """

    name = "hierarchical"
    Config = HierarchicalConfig

    @classmethod
    def make_exchange(cls, config: SyncConfig, codec: Codec, membership: Membership) -> Exchange:
        """Along the groups of `mapping.groups`."""
        assert isinstance(config, HierarchicalConfig)
        if isinstance(codec, JointCodec):
            return Conversation(codec, cls.make_exchange(config, NoCodec(NoKnobs()), membership))
        assert isinstance(codec, BlockCodec)
        return Tiers(
            codec,
            membership.group,
            membership.tiers,
            levels=grouping(config.groups, membership.tiers),
            chunk_bytes=int(config.chunk_mb * 2**20),
            slow_only=config.compressed_tier == "slow",
        )
