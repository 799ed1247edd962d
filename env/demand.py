"""What strategies ask of a cluster: samples, bytes and collectives, which follow exactly from the knobs.

A knob or value that this file does not know has no effect.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.env.network import Network, Route
from paceline.runtime.compress.base import CODECS, BlockCodec
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.knobs import config_from
from paceline.runtime.mapping.base import batch_shares, device_order
from paceline.runtime.mapping.levels import grouping, tier_levels

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STATE_COPIES = 5.0
"""Memory of weights, gradients, two moments and buckets, in copies of the fp32 parameters."""
CAST_PASSES = 3.0
"""Memory traffic of casting a gradient down and back, in passes over its fp32 bytes: (4+2 + 2+4)/4."""
SELECT_PASSES = 40.0
"""The same for a codec that selects elements: a partial sort and a gather, as torch.topk does on a CPU."""
FEEDBACK_PASSES = 6.0
"""The same for error feedback: add the residual, decode what was sent, subtract, store."""
SCATTER_PASSES = 4.0
"""Memory traffic of adding one gathered payload, in passes over the payload's bytes."""
CAST_LOSS = 0.1
"""What a cast loses, on the scale of `Demand.information_loss`."""
NO_FEEDBACK_LOSS = 5.0
"""How many times more a sparsifying codec loses when it never sends what it dropped."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Exact figures of S strategies; every array has shape [S] unless stated."""

    slowest_work: Floats
    """Time of forward and backward in fp32 on the slowest rank at its probed speed, s."""
    mean_work: Floats
    """The same, mean over ranks, s."""
    largest_share: Floats
    """Samples per step of the rank with most."""
    bf16: Bools
    """Whether forward and backward compute in bfloat16."""
    period: Floats
    """Optimizer steps per exchange."""
    overlapped: Bools
    """Whether buckets are exchanged while the backward pass still runs."""
    buckets: Floats
    """Buckets per exchange."""
    chunks: Floats
    """Pieces per exchange that pass through the levels of a hierarchical exchange one after the other."""
    sequential_seconds: Floats
    """Time of an exchange at the probed rates when no two levels work at once, s."""
    pipelined_seconds: Floats
    """The same when all levels work all the time: how long the busiest link is busy, s."""
    on_node: Bools
    """Whether CPU devices of one node exchange with each other, which costs them compute."""
    codec_bytes: Floats
    """Memory traffic of encoding and decoding per exchange, B."""
    state_bytes: Floats
    """Memory of weights, gradients, two moments and what sync mode and codec keep, B."""
    information_loss: Floats
    """What the codec loses: 0 if exact; log10(elements / elements sent) with error feedback."""
    tiers: tuple[str, ...]
    """Names of the T tiers of traffic, the innermost first."""
    wire_bytes: Floats
    """Bytes that all ranks send on each tier per step on average, B, [S, T]."""

    @property
    def load_balance_error(self) -> Floats:
        """(slowest - mean)/mean of the ranks' compute time."""
        error: Floats = self.slowest_work / self.mean_work - 1
        return error


def demand(workload: WorkloadProfile, cluster: Cluster, strategies: Sequence[Strategy]) -> Demand:
    """Work out the figures of strategies of one knob space, with one rank per device.

    Raises IllegalStrategy where a rank would be left without a sample, and InvalidRequest where the cluster does not
    describe a link that an exchange uses.
    """
    network = Network(cluster)
    hierarchical = [strategy["sync.mode"] == "hierarchical" for strategy in strategies]
    local = np.array([strategy["sync.mode"] == "local_sgd" for strategy in strategies])
    works = _once_per(
        [(strategy["mapping.order"], strategy["mapping.batch_share"]) for strategy in strategies],
        lambda index: _work(workload, cluster, strategies[index]),
    )
    routes = _once_per(
        [
            (strategy["mapping.order"], strategy["mapping.groups"] if nested else None)
            for strategy, nested in zip(strategies, hierarchical, strict=True)
        ],
        lambda index: _route(network, cluster, strategies[index]),
    )
    # Strategies of one space have the same knobs in the same places.
    places = [p for p, (name, _) in enumerate(strategies[0].items_) if name.startswith(("compress.", "sync.bucket_mb"))]
    messages = _once_per(
        [tuple([strategy.items_[place] for place in places]) for strategy in strategies],
        lambda index: _message(workload, strategies[index]),
    )
    period = np.array(
        [float(strategy["sync.period"]) if strategy["sync.mode"] == "local_sgd" else 1.0 for strategy in strategies]
    )
    slowest_work, mean_work, largest_share = np.array(works).T
    exchange = _exchange(workload, cluster, strategies, routes, messages)
    # Local SGD keeps the parameters of the last exchange.
    copies = STATE_COPIES + local
    cpu = all(device.kind == "cpu" for device in cluster.devices)
    return Demand(
        slowest_work=slowest_work,
        mean_work=mean_work,
        largest_share=largest_share,
        bf16=np.array([strategy["precision.compute"] == "bf16" for strategy in strategies]),
        period=period,
        overlapped=~local,
        buckets=np.array([message.buckets for message in messages]),
        chunks=exchange.chunks,
        sequential_seconds=exchange.sequential_seconds,
        pipelined_seconds=exchange.pipelined_seconds,
        on_node=np.array([cpu and route.on_node for route in routes]),
        codec_bytes=exchange.codec_bytes,
        state_bytes=copies * workload.gradient_bytes + exchange.kept_bytes,
        information_loss=np.array([message.information_loss for message in messages]),
        tiers=network.tiers,
        wire_bytes=exchange.sent / period[:, None],
    )


def _once_per(keys: Sequence[Hashable], compute: Callable[[int], T]) -> list[T]:
    """`compute` of each index, called once for all that have the same key."""
    found: dict[Hashable, T] = {}
    for index, key in enumerate(keys):
        if key not in found:
            found[key] = compute(index)
    return [found[key] for key in keys]


class _Work(NamedTuple):
    """What order and batch shares decide; fields as in Demand."""

    slowest: float
    mean: float
    largest_share: float


def _work(workload: WorkloadProfile, cluster: Cluster, strategy: Strategy) -> _Work:
    order = device_order(strategy, cluster, cluster.size)
    shares = batch_shares(strategy, cluster, order, workload.global_batch)
    seconds = [
        workload.flops_per_sample * share / cluster.devices[index].profile.flops
        for share, index in zip(shares, order, strict=True)
    ]
    return _Work(max(seconds), sum(seconds) / len(seconds), float(max(shares)))


def _route(network: Network, cluster: Cluster, strategy: Strategy) -> Route:
    order = device_order(strategy, cluster, cluster.size)
    if strategy["sync.mode"] != "hierarchical":
        return network.route(order, ())
    return network.route(
        order, [level.groups for level in grouping(str(strategy["mapping.groups"]), tier_levels(cluster, order))]
    )


class _Message(NamedTuple):
    """What `compress.*` and `sync.bucket_mb` decide."""

    buckets: float
    """As in Demand."""
    payload: float
    """Bytes of all that a rank has, encoded."""
    linear: bool
    """Whether payloads can be summed on the wire."""
    traffic: float
    """Memory traffic of encoding and decoding all that a rank has, B."""
    residual: float
    """Memory of the residual, B."""
    information_loss: float
    """As in Demand."""


def _message(workload: WorkloadProfile, strategy: Strategy) -> _Message:
    bucket_bytes = float(strategy["sync.bucket_mb"]) * 2**20
    # A parameter tensor is never split, so there are at most as many buckets as tensors.
    buckets = min(workload.parameter_tensors, math.ceil(workload.gradient_bytes / bucket_bytes))
    name = str(strategy["compress.codec"])
    plugin = CODECS.get(name if name in CODECS.names() else "none")
    codec = plugin(config_from(plugin.Config, strategy))
    elements, larger = divmod(workload.parameters, buckets)
    payload = larger * codec.bucket_bytes([torch.Size([elements + 1])])
    payload += (buckets - larger) * codec.bucket_bytes([torch.Size([elements])])
    residual = workload.gradient_bytes * codec.error_feedback
    passes, loss = CAST_PASSES * codec.lossy, CAST_LOSS * codec.lossy
    linear = not isinstance(codec, BlockCodec) or codec.linear
    if not linear:
        # An element is sent as its value and its index.
        sent = min(1.0, payload / (2 * workload.gradient_bytes))
        passes, loss = SELECT_PASSES, -math.log10(sent) * (1.0 if codec.error_feedback else NO_FEEDBACK_LOSS)
    return _Message(
        buckets=buckets,
        payload=payload,
        linear=linear,
        traffic=FEEDBACK_PASSES * residual + passes * workload.gradient_bytes,
        residual=residual,
        information_loss=loss,
    )


class _Exchange(NamedTuple):
    """Messages on their routes; fields as in Demand, [S] unless stated."""

    chunks: Floats
    sequential_seconds: Floats
    pipelined_seconds: Floats
    sent: Floats
    """Bytes that all ranks send on each tier per exchange, [S, T]."""
    codec_bytes: Floats
    kept_bytes: Floats
    """Memory of the residual and of gathered payloads, B."""


def _exchange(
    workload: WorkloadProfile,
    cluster: Cluster,
    strategies: Sequence[Strategy],
    routes: Sequence[Route],
    messages: Sequence[_Message],
) -> _Exchange:
    gradient, ranks = workload.gradient_bytes, cluster.size
    buckets, payload, linear, traffic, residual, _ = np.array(messages).T
    # Chunk size of what passes through several levels, and whether the codec applies to the last of them alone.
    chunk_bytes, coded_last = np.array(
        [
            (float(strategy["sync.chunk_mb"]) * 2**20, strategy["compress.tier"] == "slow")
            if strategy["sync.mode"] == "hierarchical"
            else (math.inf, False)
            for strategy in strategies
        ]
    ).T
    chunks = buckets * np.maximum(1, np.ceil(gradient / buckets / chunk_bytes))
    # A flat exchange gathers what cannot be summed on the wire; a hierarchical one decodes and sums at every level.
    gathered = np.where((linear > 0) | np.isfinite(chunk_bytes), 0.0, ranks)

    distinct = {id(route): route for route in routes}
    places = {key: place for place, key in enumerate(distinct)}
    rows = [places[id(route)] for route in routes]
    levels, busy, sent = (
        np.array([getattr(route, name) for route in distinct.values()])[rows] for name in ("levels", "busy", "sent")
    )
    seconds, share, rounds = np.moveaxis(levels, 2, 0)
    # The last level is where nothing follows.
    last = np.cumsum(share[:, ::-1], axis=1)[:, ::-1] == share
    coded = last | (coded_last == 0)[:, None]
    size = np.where(coded, (payload * np.maximum(1, gathered / 2))[:, None], gradient)
    latency = max(device.profile.net_latency for device in cluster.devices) * chunks[:, None] * rounds
    level = seconds * size
    link = (busy * size[:, :, None]).sum(axis=1)
    received = (sent.sum(axis=2) * size * coded).sum(axis=1) / ranks
    return _Exchange(
        chunks=chunks,
        sequential_seconds=(level + latency).sum(axis=1),
        pipelined_seconds=np.maximum(link.max(axis=1), level.max(axis=1)) + latency.max(axis=1),
        sent=(sent * size[:, :, None]).sum(axis=1),
        # A codec works on what a rank has when the exchange comes to a level.
        codec_bytes=traffic * (share * coded).sum(axis=1) + np.where(linear, 0.0, SCATTER_PASSES * received),
        kept_bytes=residual + gathered * payload,
    )
