"""What strategies ask of a cluster: samples, bytes and collectives, which follow exactly from the knobs.

A knob or value that this file does not know has no effect.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.runtime.compress.base import CODECS
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.knobs import config_from
from paceline.runtime.mapping.base import batch_shares, device_order

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
    """Exact figures of S strategies; every array has shape [S]."""

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
    """Collectives per exchange."""
    ring_bytes: Floats
    """Bytes that a rank sends per exchange: 2(n-1)/n x payload if summed on the wire, (n-1) x if gathered."""
    ring_bandwidth: Floats
    """Rate of the slowest hop of the ring of ranks, B/s; infinite for one rank."""
    on_node: Bools
    """Whether CPU devices of one node exchange with each other, which costs them compute."""
    codec_bytes: Floats
    """Memory traffic of encoding and decoding per exchange, B."""
    state_bytes: Floats
    """Memory of weights, gradients, two moments and what sync mode and codec keep, B."""
    information_loss: Floats
    """What the codec loses: 0 if exact; log10(elements / elements sent) with error feedback."""
    wire_bytes: Floats
    """Bytes that all ranks send per step on average, B."""

    @property
    def load_balance_error(self) -> Floats:
        """(slowest - mean)/mean of the ranks' compute time."""
        error: Floats = self.slowest_work / self.mean_work - 1
        return error


def demand(workload: WorkloadProfile, cluster: Cluster, strategies: Sequence[Strategy]) -> Demand:
    """Work out the figures, with one rank per device.

    Raises IllegalStrategy where a rank would be left without a sample, and InvalidRequest where the cluster does not
    describe a link that the ring of ranks uses.
    """
    placements = _once_per(("mapping.",), strategies, lambda strategy: _placement(workload, cluster, strategy))
    exchanges = _once_per(
        ("compress.", "sync.bucket_mb"), strategies, lambda strategy: _exchange(workload, cluster.size, strategy)
    )
    local = np.array([strategy["sync.mode"] == "local_sgd" for strategy in strategies])
    period = np.array(
        [float(strategy["sync.period"]) if strategy["sync.mode"] == "local_sgd" else 1.0 for strategy in strategies]
    )
    ring_bytes = np.array([exchange.ring_bytes for exchange in exchanges])
    # Local SGD keeps the parameters of the last exchange.
    copies = STATE_COPIES + local
    return Demand(
        slowest_work=np.array([place.slowest_work for place in placements]),
        mean_work=np.array([place.mean_work for place in placements]),
        largest_share=np.array([place.largest_share for place in placements]),
        bf16=np.array([strategy["precision.compute"] == "bf16" for strategy in strategies]),
        period=period,
        overlapped=~local,
        buckets=np.array([exchange.buckets for exchange in exchanges]),
        ring_bytes=ring_bytes,
        ring_bandwidth=np.array([place.ring_bandwidth for place in placements]),
        on_node=np.array([place.on_node for place in placements]),
        codec_bytes=np.array([exchange.codec_bytes for exchange in exchanges]),
        state_bytes=copies * workload.gradient_bytes + [exchange.kept_bytes for exchange in exchanges],
        information_loss=np.array([exchange.information_loss for exchange in exchanges]),
        wire_bytes=ring_bytes * cluster.size / period,
    )


def _once_per(prefixes: tuple[str, ...], strategies: Sequence[Strategy], compute: Callable[[Strategy], T]) -> list[T]:
    """`compute` of each strategy, called once for all that agree on the knobs whose names begin so."""
    found: dict[tuple[object, ...], T] = {}
    values = []
    for strategy in strategies:
        key = tuple(item for item in strategy.items_ if item[0].startswith(prefixes))
        if key not in found:
            found[key] = compute(strategy)
        values.append(found[key])
    return values


class _Placement(NamedTuple):
    """What `mapping.*` decides; fields as in Demand."""

    slowest_work: float
    mean_work: float
    largest_share: float
    ring_bandwidth: float
    on_node: bool


def _placement(workload: WorkloadProfile, cluster: Cluster, strategy: Strategy) -> _Placement:
    order = device_order(strategy, cluster, cluster.size)
    shares = batch_shares(strategy, cluster, order, workload.global_batch)
    devices = [cluster.devices[index] for index in order]
    work = [
        workload.flops_per_sample * share / device.profile.flops for share, device in zip(shares, devices, strict=True)
    ]
    ring = pairwise([*devices, devices[0]]) if len(devices) > 1 else ()
    hops = Counter((sender.node, receiver.node) for sender, receiver in ring)
    cpu = all(device.kind == "cpu" for device in devices)
    return _Placement(
        slowest_work=max(work),
        mean_work=sum(work) / len(work),
        largest_share=float(max(shares)),
        ring_bandwidth=min((_rate(cluster, hop, flows) for hop, flows in hops.items()), default=math.inf),
        on_node=cpu and any(source == target for source, target in hops),
    )


def _rate(cluster: Cluster, hop: tuple[str, str], flows: int) -> float:
    """Rate of one rank's traffic on a hop. Flows between two nodes share their link; inside one it is given."""
    for link in cluster.links:
        if (link.source, link.target) == hop:
            return link.bandwidth if link.source == link.target else link.bandwidth / flows
    raise InvalidRequest(f"cluster {cluster.name} describes no link {hop[0]}->{hop[1]}; probe it again")


class _Exchange(NamedTuple):
    """What `compress.*` and `sync.bucket_mb` decide; fields as in Demand."""

    buckets: float
    ring_bytes: float
    codec_bytes: float
    kept_bytes: float
    """Memory of the residual and of gathered payloads, B."""
    information_loss: float


def _exchange(workload: WorkloadProfile, world_size: int, strategy: Strategy) -> _Exchange:
    bucket_bytes = float(strategy["sync.bucket_mb"]) * 2**20
    # A parameter tensor is never split, so there are at most as many buckets as tensors.
    buckets = min(workload.parameter_tensors, math.ceil(workload.gradient_bytes / bucket_bytes))
    name = str(strategy["compress.codec"])
    plugin = CODECS.get(name if name in CODECS.names() else "none")
    codec = plugin(config_from(plugin.Config, strategy))
    elements, larger = divmod(workload.parameters, buckets)
    payload = larger * codec.payload_bytes(elements + 1) + (buckets - larger) * codec.payload_bytes(elements)
    residual = workload.gradient_bytes * codec.error_feedback
    traffic = FEEDBACK_PASSES * residual
    if codec.linear:
        return _Exchange(
            buckets=buckets,
            ring_bytes=2 * (world_size - 1) / world_size * payload,
            codec_bytes=traffic + CAST_PASSES * workload.gradient_bytes * codec.lossy,
            kept_bytes=residual,
            information_loss=CAST_LOSS * codec.lossy,
        )
    # An element is sent as its value and its index.
    sent = min(1.0, payload / (2 * workload.gradient_bytes))
    return _Exchange(
        buckets=buckets,
        ring_bytes=(world_size - 1) * payload,
        codec_bytes=traffic + SELECT_PASSES * workload.gradient_bytes + SCATTER_PASSES * world_size * payload,
        kept_bytes=residual + world_size * payload,
        information_loss=-math.log10(sent) * (1.0 if codec.error_feedback else NO_FEEDBACK_LOSS),
    )
