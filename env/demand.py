"""What strategies ask of a cluster: samples, bytes and collectives, which follow exactly from the knobs.

A knob or value that the simulator does not know has no effect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.env.codecs import message, slowest_rates
from paceline.env.exchanges import PLANNED_BY, Placement, exchange, inner_route, once_per, plan
from paceline.env.forms import Floats
from paceline.env.network import network_of
from paceline.env.schedule import Bools, Columns, complete, schedule
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.mapping import batch_shares

STATE_COPIES = 5.0
"""Memory of weights, gradients, two moments and buckets, in copies of the fp32 parameters."""
MODE_COPIES = {"local_sgd": 1.0, "diloco": 2.0, "async": 2.0}
"""The same of what a sync mode keeps besides: the parameters last agreed on and outer momentum; or a second model and
the parameters that are being pulled."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Exact figures of S strategies; every array has shape [S] unless stated."""

    ranks: int
    """Number of ranks."""
    slowest_work: Floats
    """Time of forward and backward in fp32 on the rank that all wait for, at its probed speed, s."""
    mean_work: Floats
    """The same, mean over ranks, s."""
    largest_share: Floats
    """Samples per step of the rank with most."""
    precision: tuple[str, ...]
    """Number format of forward and backward."""
    period: Floats
    """Optimizer steps per exchange."""
    slack: Floats
    """Steps that a rank may fall behind before others wait for it, per optimizer step."""
    buckets: Floats
    """Buckets per exchange."""
    chunks: Floats
    """Pieces per exchange that pass through the legs of an exchange one after the other."""
    sequential_seconds: Floats
    """Time of an exchange on average at the probed rates when no two legs work at once, s."""
    pipelined_seconds: Floats
    """The same when all legs work all the time: how long the busiest link is busy, s."""
    hideable: Floats
    """Part of an exchange that may take place while ranks compute."""
    hidden_behind: Floats
    """Time that they compute meanwhile, in forward and backward passes."""
    inner_seconds: Floats
    """Time of what groups of ranks exchange every step besides, at the probed rates, s."""
    inner_hideable: Floats
    """As `hideable`, of that."""
    on_node: Bools
    """Whether CPU devices of one node exchange with each other, which costs them compute."""
    codec_seconds: Floats
    """Time of encoding and decoding per exchange on average, at the probed rates, s."""
    state_bytes: Floats
    """Memory of weights, gradients, two moments and what sync mode and codec keep, B."""
    information_loss: Floats
    """What the codec loses, in the unit of `codecs.Prior`; 0 if exact."""
    drift_steps: Floats
    """Steps that replicas go their own ways, weighed by how many there are: 0 with one, 1 with one per rank."""
    outer_rate: Floats
    """Learning rate of the outer optimizer with its momentum built up; 0 where there is none."""
    rested_steps: Floats
    """Steps that layers wait for an update while others get theirs, mean over layers."""
    staleness: Floats
    """Mean age of gradients, in updates."""
    damped: Bools
    """Whether the learning rate is divided by that."""
    tiers: tuple[str, ...]
    """Names of the T tiers of traffic, the innermost first."""
    wire_bytes: Floats
    """Bytes that all send on each tier per step on average, B, [S, T]."""
    peak_bytes: Floats
    """Bytes that all send in the step with most, B."""

    @property
    def load_balance_error(self) -> Floats:
        """(slowest - mean)/mean of the ranks' compute time."""
        error: Floats = self.slowest_work / self.mean_work - 1
        return error

    @property
    def busy_seconds(self) -> Floats:
        """How long exchanges keep the busiest link busy, per step on average, s."""
        busy: Floats = self.pipelined_seconds / self.period + self.inner_seconds
        return busy


def demand(
    workload: WorkloadProfile, cluster: Cluster, strategies: Sequence[Strategy], *, world_size: int | None = None
) -> Demand:
    """Work out the figures of strategies of one knob space, with so many ranks; None: one per device.

    Raises IllegalStrategy where a rank would be left without a sample or a reducer without a device, and InvalidRequest
    where the cluster does not describe a link that an exchange uses.
    """
    strategies = complete(strategies)
    ranks, gradient = world_size or cluster.size, workload.gradient_bytes
    owners = min(ranks, workload.parameter_tensors)
    profiles = [device.profile for device in cluster.devices]
    network, knobs = network_of(cluster), Columns(strategies)
    order, mode = knobs["mapping.order"], knobs["sync.mode"]
    placements = once_per(order, lambda index: Placement.of(strategies[index], cluster, ranks))
    works = once_per(
        list(zip(order, knobs["mapping.batch_share"], strict=True)),
        lambda index: _work(workload, cluster, strategies[index], placements[index]),
    )
    slowest, mean, largest_share, shared, longest, unevenness = np.array(works).T
    timing = schedule(workload, knobs, owners=owners)
    buckets = timing.buckets.astype(int).tolist()
    rates = slowest_rates(profiles)
    messages = once_per(
        list(zip(buckets, *knobs.starting("compress."), knobs["precision.reduce"], strict=True)),
        lambda index: message(workload, rates, strategies[index], buckets[index]),
    )
    plans = once_per(
        list(zip([each.sums for each in messages], *map(knobs.__getitem__, PLANNED_BY), strict=True)),
        lambda index: plan(network, cluster, placements[index], strategies[index], messages[index].sums, owners=owners),
    )
    latency = max(profile.net_latency for profile in profiles)
    cost = exchange(gradient, latency, timing.buckets, plans, messages)

    inner_seconds, inner_sent = np.zeros(len(strategies)), np.zeros((len(strategies), len(network.tiers)))
    apart = np.ones(len(strategies))
    on_node = np.array([each.route.on_node for each in plans])
    for index in np.flatnonzero(timing.inner):
        route, replicas = inner_route(network, placements[index])
        inner_seconds[index] = route.seconds[0] * gradient + latency * timing.inner_buckets[index] * route.rounds[0]
        inner_sent[index] = route.sent[0] * gradient
        on_node[index] |= route.on_node
        apart[index] = (replicas - 1) / max(1, ranks - 1)
    losses = [
        sent.recoded_loss if each.recoded else sent.information_loss for each, sent in zip(plans, messages, strict=True)
    ]
    copies = STATE_COPIES + np.array([MODE_COPIES.get(str(each), 0.0) for each in mode])
    return Demand(
        ranks=ranks,
        # Nobody waits for others before they are as many steps behind as a gradient may lack updates.
        slowest_work=np.where(timing.asynchronous, np.maximum(shared, longest / (1 + timing.stale)), slowest),
        mean_work=np.where(timing.asynchronous, shared, mean),
        largest_share=largest_share,
        precision=tuple(map(str, knobs["precision.compute"])),
        period=timing.period,
        slack=timing.slack,
        buckets=timing.buckets,
        chunks=cost.chunks,
        sequential_seconds=timing.due * cost.sequential_seconds,
        pipelined_seconds=timing.due * cost.pipelined_seconds,
        hideable=timing.hideable,
        hidden_behind=timing.hidden_behind,
        inner_seconds=inner_seconds,
        inner_hideable=1 - 1 / timing.inner_buckets,
        on_node=on_node & all(device.kind == "cpu" for device in cluster.devices),
        codec_seconds=timing.due * cost.codec_seconds,
        state_bytes=copies * gradient + cost.kept_bytes,
        information_loss=np.array(losses),
        drift_steps=apart * timing.local_steps,
        outer_rate=timing.outer_rate,
        rested_steps=timing.rested_steps,
        # While a gradient is computed the others make an update, more of them on a slow device; and few gradients are
        # as late as they may.
        staleness=np.minimum(timing.stale / 2, unevenness),
        damped=timing.damped,
        tiers=network.tiers,
        wire_bytes=cost.sent * (timing.due / timing.period)[:, None] + inner_sent,
        peak_bytes=cost.sent.sum(axis=1) * timing.at_once + inner_sent.sum(axis=1),
    )


class _Work(NamedTuple):
    """What order and batch shares decide; the first three as in Demand, for ranks in lockstep."""

    slowest: float
    mean: float
    largest_share: float
    shared: float
    """Time of a step when whoever is free takes the next part of the batch, s."""
    longest: float
    """Time of a part on the slowest device, s."""
    unevenness: float
    """Mean time of a part relative to `shared`."""


def _work(workload: WorkloadProfile, cluster: Cluster, strategy: Strategy, placement: Placement) -> _Work:
    shares = batch_shares(strategy, cluster, placement.order, workload.global_batch)
    flops = [cluster.devices[device].profile.flops for device in placement.order]
    seconds = [workload.flops_per_sample * share / rate for share, rate in zip(shares, flops, strict=True)]
    shared = workload.flops_per_sample * workload.global_batch / sum(flops)
    part = workload.flops_per_sample * workload.global_batch / len(flops)
    return _Work(
        slowest=max(seconds),
        mean=sum(seconds) / len(seconds),
        largest_share=float(max(shares)),
        shared=shared,
        longest=part / min(flops),
        unevenness=sum(part / rate for rate in flops) / len(flops) / shared,
    )
