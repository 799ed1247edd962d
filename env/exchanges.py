"""In which form the messages of a strategy travel, and what they cost on that route."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from paceline.env import forms
from paceline.env.codecs import Message, Sums
from paceline.env.forms import Floats
from paceline.env.network import Network, Route
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.mapping import device_order, grouping, reducer_devices, tier_levels
from paceline.runtime.mapping.levels import Level
from paceline.runtime.sync.base import CHUNK_BYTES

T = TypeVar("T")

PLANNED_BY = (
    "compress.tier",
    "mapping.groups",
    "mapping.order",
    "mapping.reducers",
    "sync.chunk_mb",
    "sync.inner",
    "sync.mode",
    "sync.staleness",
)
"""Knobs that decide a plan beside how messages are added up."""


class Placement(NamedTuple):
    """Where the ranks are."""

    order: tuple[int, ...]
    """Device of each rank."""
    levels: tuple[Level, ...]
    """Tiers of the network, innermost first."""

    @classmethod
    def of(cls, strategy: Strategy, cluster: Cluster, ranks: int) -> "Placement":
        """As `mapping.order` says."""
        order = device_order(strategy, cluster, ranks)
        return cls(order, tier_levels(cluster, order))


class Plan(NamedTuple):
    """How the messages of a strategy travel."""

    route: Route
    """Between whom, per byte."""
    chunk_bytes: float = math.inf
    """Size of the pieces of a bucket that follow each other, B of fp32; infinite where there are none."""
    coded_from: int = 0
    """First leg that carries payloads; those before carry fp32."""
    coded_to: float = math.inf
    """Leg behind the last that does."""
    gathered: int = 1
    """Payloads that reach every rank in place of their sum; 1 where they are summed on their way."""
    decoded: float = 1.0
    """Payloads that a rank decodes for each that it encodes, for lack of feedback."""
    recoded: bool = False
    """Whether sums of what was lost in encoding are encoded again on their way."""


class Exchange(NamedTuple):
    """Messages on their routes, [S] unless stated. Seconds and chunks as in Demand."""

    chunks: Floats
    sequential_seconds: Floats
    pipelined_seconds: Floats
    codec_seconds: Floats
    sent: Floats
    """Bytes that all send on each of T tiers, [S, T]."""
    kept_bytes: Floats
    """Memory of residuals and gathered payloads, B."""


def once_per(keys: Sequence[Hashable], compute: Callable[[int], T]) -> list[T]:
    """`compute` of each index, called once for all that have the same key."""
    found: dict[Hashable, T] = {}
    for index, key in enumerate(keys):
        if key not in found:
            found[key] = compute(index)
    return [found[key] for key in keys]


def plan(
    network: Network, cluster: Cluster, placement: Placement, strategy: Strategy, sums: Sums, *, owners: int
) -> Plan:
    """Lay out what the runtime's sync modes do. `owners` is how many ranks have a shard of the parameters.

    Raises IllegalStrategy where reducers have no device, and InvalidRequest as `Network.route` does.
    """
    (order, levels), mode = placement, strategy["sync.mode"]
    ranks = len(order)
    if mode == "async":
        flops = [cluster.devices[device].profile.flops for device in order]
        # Without staleness a rank waits for all others after every gradient.
        parts = [each * ranks / sum(flops) for each in flops] if strategy["sync.staleness"] else [1.0] * ranks
        return Plan(network.route(order, forms.shards(owners, tuple(parts))), coded_to=1)
    groups: list[tuple[int, ...]] = []
    chunk_bytes, only_last = float(CHUNK_BYTES), False
    if mode in ("hierarchical", "reduction_server"):
        chunk_bytes = float(strategy["sync.chunk_mb"]) * 2**20
    if mode == "reduction_server":
        if reducers := reducer_devices(strategy, cluster, order):
            route = network.route((*order, *reducers), forms.reducers(ranks, len(reducers)))
            # A reducer decodes what all ranks send it, while they wait for it.
            decoded = max(1.0, ranks / len(reducers))
            # They return sums as they are, unless encoding them loses little or ranks have agreed on what is summed.
            coded_to = math.inf if sums.faithful or sums.joint else 1
            recoded = sums.faithful and not sums.linear
            return Plan(route, chunk_bytes, coded_to=coded_to, decoded=decoded, recoded=recoded)
    elif mode == "hierarchical":
        groups = [level.groups for level in grouping(str(strategy["mapping.groups"]), levels)]
        only_last = strategy["compress.tier"] == "slow"
    elif levels and strategy["sync.inner"] == "tier":
        groups, only_last = [levels[-1].groups], True
    tiered = mode == "hierarchical" or bool(groups)
    groups = [labels for labels in groups if 1 < len(set(labels)) < ranks]
    if not groups:
        if mode != "reduction_server" and (sums.linear if tiered else not sums.owners):
            gathered = 1 if sums.linear else ranks
            return Plan(network.route(order, forms.ring(ranks)), gathered=gathered, decoded=gathered)
        chunk_bytes = math.inf
    form = forms.nested(tuple(groups)) if groups else forms.pairs(ranks)
    last = max((leg for leg, share in enumerate(form.shares) if share), default=0)
    # What ranks encode in agreement stays encoded all the way.
    coded_from = last if only_last and not sums.joint else 0
    # A rank decodes what others have, and then their sums.
    return Plan(network.route(order, form), chunk_bytes, coded_from, decoded=2.0, recoded=not sums.linear)


def inner_route(network: Network, placement: Placement) -> tuple[Route, int]:
    """How the ranks of each group of the outermost tier, all ranks where there is none, exchange among themselves; and
    how many groups there are."""
    order, levels = placement
    groups = levels[-1].groups if levels else (0,) * len(order)
    return network.route(order, forms.rings(groups)), len(set(groups))


def exchange(
    gradient: int, latency: float, buckets: Floats, plans: Sequence[Plan], messages: Sequence[Message]
) -> Exchange:
    """Put messages on their routes: `gradient` bytes of fp32 each, with the latency of a ring of all ranks, s."""
    payload, encode, decode, feedback, residual, rounds_each = np.array([message[:6] for message in messages]).T
    joint = [message.sums.joint for message in messages]
    chunk_bytes, coded_from, coded_to, gathered, decoded = np.array([each[1:6] for each in plans]).T
    distinct = {id(each.route): each.route for each in plans}
    places = {key: place for place, key in enumerate(distinct)}
    rows = [places[id(each.route)] for each in plans]
    seconds, shares, rounds, busy, sent = (
        np.array([getattr(route, name) for route in distinct.values()])[rows]
        for name in ("seconds", "shares", "rounds", "busy", "sent")
    )
    leg = np.arange(seconds.shape[1])
    coded = (coded_from[:, None] <= leg) & (leg < coded_to[:, None])
    # A ring sends twice what a rank has, and n payloads that are gathered pass through every rank.
    size = np.where(coded, (payload * np.maximum(1, gathered / 2))[:, None], gradient)
    chunks = buckets * np.maximum(1, np.ceil(gradient / buckets / chunk_bytes))
    messages_seconds = latency * chunks[:, None] * rounds * rounds_each[:, None]
    leg_seconds = seconds * size
    link_seconds = (busy * size[:, :, None]).sum(axis=1).max(axis=1, initial=0.0)
    # A joint codec encodes once, and sums travel as they are; others encode what a rank has on each leg.
    encoded = np.where(joint, 1.0, (shares * coded).sum(axis=1))
    codec = encoded * (encode + decode * decoded + feedback + decode * (residual > 0))
    return Exchange(
        chunks=chunks,
        sequential_seconds=(leg_seconds + messages_seconds).sum(axis=1),
        pipelined_seconds=np.maximum(link_seconds, leg_seconds.max(axis=1)) + messages_seconds.max(axis=1),
        codec_seconds=codec,
        sent=(sent * size[:, :, None]).sum(axis=1),
        kept_bytes=residual + np.where(gathered > 1, gathered * payload, 0.0),
    )
