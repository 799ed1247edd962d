"""How a bucket becomes its mean over all ranks: residuals and counting around an exchange, flat or by tiers."""

from paceline.runtime.exchange.averager import BucketAverager
from paceline.runtime.exchange.base import Exchange
from paceline.runtime.exchange.joint import Conversation
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.exchange.plan import make_plan
from paceline.runtime.exchange.reductions import ReductionClient, reduce_for
from paceline.runtime.exchange.ring import Ring, all_gather_bytes, all_reduce_bytes
from paceline.runtime.exchange.shards import Shard, Shards
from paceline.runtime.exchange.tiers import Tiers

__all__ = [
    "BucketAverager",
    "Conversation",
    "Exchange",
    "ReductionClient",
    "Ring",
    "Shard",
    "Shards",
    "StepMeter",
    "Tiers",
    "all_gather_bytes",
    "all_reduce_bytes",
    "make_plan",
    "reduce_for",
]
