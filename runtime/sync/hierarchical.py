"""Gradients averaged every step, tier by tier."""

from dataclasses import dataclass

from paceline.runtime.compress.base import Codec
from paceline.runtime.domain.domains import Categorical, PerRank
from paceline.runtime.exchange import Exchange
from paceline.runtime.knobs import knob
from paceline.runtime.mapping.levels import grouping
from paceline.runtime.membership import Membership
from paceline.runtime.sync.allreduce import AllReduce
from paceline.runtime.sync.base import CHUNK_MB, SYNC_MODES, SyncConfig, tiered_exchange
from paceline.runtime.sync.parts import LayeredConfig


@dataclass(frozen=True, kw_only=True)
class HierarchicalConfig(LayeredConfig):
    """Knobs of `hierarchical`."""

    groups: str = knob("mapping.groups", PerRank(named=("tiers",), permutation=False), default="tiers")
    """Ranks that exchange among themselves first: `tiers`, those of a node, then of a rack, as measured; or a positive
    group number per rank."""
    compressed_tier: str = knob("compress.tier", Categorical(choices=("all", "slow")), default="all")
    """Where the codec applies: at all levels, or at the slow one alone, which joins the outermost groups."""
    chunk_mb: float = knob("sync.chunk_mb", CHUNK_MB, default=0.5)
    """Size of the chunks of a bucket that follow each other through an exchange, MiB of fp32, 0.0625 to 16."""


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
        return tiered_exchange(
            codec,
            membership,
            grouping(config.groups, membership.tiers),
            chunk_bytes=int(config.chunk_mb * 2**20),
            slow_only=config.compressed_tier == "slow",
        )
