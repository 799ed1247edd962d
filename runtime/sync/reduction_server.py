"""Gradients averaged every step by reducers."""

from dataclasses import dataclass

import torch.distributed as dist

from paceline.runtime.compress.base import CODECS, BlockCodec, Codec, JointCodec
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.domain.domains import Integers
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.exchange import Conversation, Exchange, ReductionClient, StepMeter, Tiers, make_plan, reduce_for
from paceline.runtime.knobs import NoKnobs, config_from, knob
from paceline.runtime.membership import Membership
from paceline.runtime.sync.allreduce import AllReduce
from paceline.runtime.sync.base import CHUNK_MB, SYNC_MODES, SyncConfig
from paceline.runtime.sync.parts import LayeredConfig


@dataclass(frozen=True, kw_only=True)
class ReductionServerConfig(LayeredConfig):
    """Knobs of `reduction_server`."""

    reducers: str = knob(
        "mapping.reducers",
        Integers(named=("beside", "spare"), low=0, high=1023, most=64, distinct=True),
        default="beside",
    )
    """Where gradients are summed: `beside` each rank, a part in every worker; on the `spare` devices, those that no
    rank runs on; or on these devices, by index."""
    chunk_mb: float = knob("sync.chunk_mb", CHUNK_MB, default=0.5)
    """Size of the chunks of a bucket that follow each other through an exchange, MiB of fp32, 0.0625 to 16."""

    @property
    def chunk_bytes(self) -> int:
        """The same in bytes."""
        return int(self.chunk_mb * 2**20)


@SYNC_MODES.register
class ReductionServer(AllReduce):
    """Synchronous data parallelism with sharded reducers: each rank sends a gradient once and receives the sum once.

    Every reducer sums a part of each bucket while it arrives and returns it chunk by chunk. Beside 2 (n - 1) / n times
    the gradient that a ring of n ranks sends and receives, that saves up to half the time. It cannot win with two
    ranks, where a ring sends as much; nor with reducers that share the ranks' links (`beside`, or spare devices in the
    same nodes), as what a link saves as a rank's it carries as a reducer's; nor where k reducers have less than n / k
    times the rate of a rank's link. What a reducer's own encoding drops is not fed back: codecs whose every element
    arrives to within a rounding error are used in both directions, others towards the reducers only.
    """

    name = "reduction_server"
    Config = ReductionServerConfig

    @classmethod
    def make_exchange(cls, config: SyncConfig, codec: Codec, membership: Membership) -> Exchange:
        """To the reducers of the generation, or to one another."""
        assert isinstance(config, ReductionServerConfig)
        if isinstance(codec, JointCodec):
            return Conversation(codec, cls.make_exchange(config, NoCodec(NoKnobs()), membership))
        assert isinstance(codec, BlockCodec)
        if membership.reducers:
            return ReductionClient(codec, membership, chunk_bytes=config.chunk_bytes)
        plan = make_plan((), membership.rank, membership.world_size)
        return Tiers(codec, membership.group, membership.tiers, plan, chunk_bytes=config.chunk_bytes)

    def arrive(self, step: int) -> StepMeter:
        """Let the reducers rest."""
        exchange = self.averager.exchange
        carrier = exchange.carrier if isinstance(exchange, Conversation) else exchange
        if isinstance(carrier, ReductionClient):
            carrier.end()
        return StepMeter()


def serve_reductions(strategy: Strategy, links: dist.ProcessGroup, ranks: int) -> None:
    """Be one of the reducers of a strategy, behind the first `ranks` of `links`, for one run."""
    config = config_from(ReductionServerConfig, strategy)
    plugin = CODECS.get(str(strategy["compress.codec"]))
    codec = plugin(config_from(plugin.Config, strategy))
    plain = codec if isinstance(codec, BlockCodec) else NoCodec(NoKnobs())
    reduce_for(plain, links, ranks, chunk_bytes=config.chunk_bytes)
