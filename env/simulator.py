"""A vectorised cost model of one training step: S strategies under E draws of what the model does not know.

The exact part is in `demand.py`. Here is the rest: efficiencies, overlap, contention, stragglers, memory, and what a
strategy costs in statistical efficiency. All-reduce and all-gather are costed as rings (Thakur et al.,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19, 2005), on one level or on several that work
as a pipeline; buckets overlap the backward pass as in Li et al., "PyTorch Distributed" (arXiv:2006.15704).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from paceline.env.demand import Demand, demand
from paceline.env.forms import Floats
from paceline.env.schedule import BACKWARD, Bools
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest

LAUNCH_SECONDS = 2e-5
"""Time per parameter tensor and step, whatever its size: launches of forward, backward and optimizer."""
OPTIMIZER_PASSES = 7.0
"""Memory traffic of Adam, in passes over the fp32 parameters: read four tensors, write three."""
FLOPS_PER_ACTIVATION_BYTE = 500.0
"""FLOP of forward and backward per byte of activation kept: about the width of a transformer."""
OUTER_MISMATCH = 0.1
"""Samples lost, relative, per squared log of the outer learning rate over the best one."""
DAMPED = 0.5
"""What is left of the loss to staleness where the learning rate is divided by it."""
SLOWED = 0.05
"""Samples lost, relative, to such a learning rate, per update of staleness above 1."""
DIVERGED_BELOW = 0.15
"""Statistical efficiency below which a trial counts as diverged."""


class Format(NamedTuple):
    """What computing in a number format does."""

    gain: float = 0.0
    """Exponent of `Unknowns.bf16_speed` in the speed of forward and backward."""
    half: bool = False
    """Whether `Unknowns.fp16_speed` is a factor of it."""
    loss: float = 0.0
    """Samples lost, relative."""
    activation: float = 1.0
    """Memory of activations, relative."""


FORMATS = {
    "tf32": Format(gain=0.5, loss=0.002),
    "bf16": Format(gain=1.0, loss=0.01, activation=0.5),
    "fp16": Format(gain=1.0, half=True, loss=0.01, activation=0.5),
    "fp8": Format(gain=1.3, loss=0.03, activation=0.5),
}
"""Any other is as fp32."""


@dataclass(frozen=True, kw_only=True)
class Unknowns:
    """E draws of what a probe does not tell; every array has shape [E]."""

    compute_efficiency: Floats
    """Part of the probed FLOP/s that the workload reaches."""
    link_efficiency: Floats
    """Part of the probed bandwidth that collectives reach; their latency grows by the same factor."""
    codec_cost: Floats
    """Time of the codecs relative to `Demand.codec_seconds`."""
    bf16_speed: Floats
    """Speed of forward and backward in bfloat16 relative to fp32; below 1 where it is emulated."""
    fp16_speed: Floats
    """Speed in half precision relative to bfloat16; below 1 where it is emulated."""
    contention: Floats
    """Compute time lost per second of exchange hidden behind it, between CPU devices of one node."""
    overlap: Floats
    """Part of the possible overlap of exchange and backward pass that is reached."""
    pipelining: Floats
    """Part of the possible overlap of the levels of a hierarchical exchange that is reached."""
    period_sensitivity: Floats
    """Samples lost, relative, per local step between exchanges, where replicas go over to their mean."""
    outer_sensitivity: Floats
    """The same where an outer optimizer steps in its direction."""
    best_outer_rate: Floats
    """Outer learning rate, momentum built up, that loses nothing."""
    rest_sensitivity: Floats
    """Samples lost, relative, per unit of `Demand.rested_steps`."""
    staleness_sensitivity: Floats
    """Samples lost, relative, per update that a gradient is old."""
    compression_sensitivity: Floats
    """Samples lost, relative, per unit of `Demand.information_loss`."""
    jitter: Floats
    """Standard deviation of a rank's compute time from step to step, relative."""
    memory_factor: Floats
    """Memory needed relative to the estimate."""
    noise: Floats
    """Standard deviation of a trial's measured log goodput."""

    @classmethod
    def sample(cls, rng: np.random.Generator, count: int) -> Self:
        """Draw from the prior. Wide on purpose: it covers loopback on a laptop and GPUs on a fast fabric."""

        def lognormal(median: float, spread: float) -> Floats:
            return median * np.exp(spread * rng.standard_normal(count))

        return cls(
            compute_efficiency=lognormal(0.4, 0.5),
            link_efficiency=lognormal(0.5, 0.7),
            codec_cost=lognormal(1.0, 0.5),
            bf16_speed=np.exp(rng.uniform(np.log(0.15), np.log(4.0), count)),
            fp16_speed=np.where(rng.random(count) < 0.5, 1.0, np.exp(rng.uniform(np.log(0.1), 0.0, count))),
            contention=rng.uniform(0.0, 1.0, count),
            overlap=rng.uniform(0.3, 1.0, count),
            pipelining=rng.uniform(0.5, 1.0, count),
            period_sensitivity=lognormal(0.02, 1.2),
            # DiLoCo was made for periods of hundreds of steps.
            outer_sensitivity=lognormal(0.005, 1.2),
            best_outer_rate=lognormal(2.5, 0.7),
            rest_sensitivity=lognormal(0.3, 0.7),
            staleness_sensitivity=lognormal(0.05, 1.0),
            compression_sensitivity=lognormal(0.1, 1.2),
            jitter=lognormal(0.1, 1.0),
            memory_factor=lognormal(1.0, 0.3),
            noise=lognormal(0.02, 0.5),
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the model predicts; arrays have shape [S, E] unless stated."""

    step_seconds: Floats
    """Time of a step on average, s."""
    compute_seconds: Floats
    """Part of it in forward, backward, optimizer and codec, mean over ranks, s."""
    hidden_seconds: Floats
    """Exchange hidden behind computation, per step, s."""
    efficiency: Floats
    """Statistical efficiency: samples the default needs / samples this strategy needs."""
    goodput: Floats
    """Throughput x statistical efficiency, examples/s, as if no trial failed."""
    out_of_memory: Bools
    """Whether a device has too little memory."""
    diverged: Bools
    """Whether training diverges."""
    demand: Demand
    """The exact figures behind it, [S]."""

    @property
    def exposed_seconds(self) -> Floats:
        """Time that ranks wait for exchanges and for each other, s."""
        return self.step_seconds - self.compute_seconds

    @property
    def failed(self) -> Bools:
        """Whether the trial fails."""
        return self.out_of_memory | self.diverged

    @property
    def failure_probability(self) -> Floats:
        """Part of the draws in which the trial fails, [S]."""
        probability: Floats = self.failed.mean(axis=1)
        return probability


# Overflow is found at the end, in the result.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def simulate(
    workload: WorkloadProfile,
    cluster: Cluster,
    strategies: Sequence[Strategy],
    unknowns: Unknowns,
    *,
    world_size: int | None = None,
) -> Prediction:
    """Predict S strategies under E draws at once, with so many ranks; None: one per device.

    Unknown knobs have no effect.

    Raises IllegalStrategy or InvalidRequest as `demand` does, and InvalidRequest where the figures of workload and
    cluster are so far apart that they overflow.
    """
    facts = demand(workload, cluster, strategies, world_size=world_size)
    devices = [device.profile for device in cluster.devices]
    mem_bw = min(device.mem_bw for device in devices)

    def column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[:, None]

    formats = [FORMATS.get(name, Format()) for name in dict.fromkeys(facts.precision)]
    places = {name: place for place, name in enumerate(dict.fromkeys(facts.precision))}
    rows = [places[name] for name in facts.precision]
    gain, half, format_loss, activation = np.array(formats, dtype=np.float64).T
    speeds = unknowns.compute_efficiency * unknowns.bf16_speed ** column(gain)
    speed = np.where(column(half), speeds * unknowns.fp16_speed, speeds)[rows]

    period = column(facts.period)
    launches = workload.parameter_tensors * LAUNCH_SECONDS / unknowns.compute_efficiency
    mean = column(facts.mean_work) / speed + launches
    slowest = column(facts.slowest_work) / speed + launches
    # The largest of n normal variables is expected at sqrt(2 ln n); over a period of local steps jitter averages out.
    behind = unknowns.jitter * np.sqrt(2 * math.log(facts.ranks) / period)
    wait = slowest * np.maximum(0.0, behind - column(facts.slack))
    optimizer = OPTIMIZER_PASSES * workload.gradient_bytes / mem_bw

    codec = unknowns.codec_cost * column(facts.codec_seconds)
    # Legs can work at once on all chunks but the one with which the pipeline fills.
    saved = column((1 - 1 / facts.chunks) * (facts.sequential_seconds - facts.pipelined_seconds))
    exchange = (column(facts.sequential_seconds) - unknowns.pipelining * saved) / unknowns.link_efficiency
    hidden = unknowns.overlap * column(facts.hideable) * np.minimum(exchange, column(facts.hidden_behind) * slowest)
    exposed, hidden = (exchange - hidden) / period, hidden / period
    if facts.inner_seconds.any():
        inner = column(facts.inner_seconds) / unknowns.link_efficiency
        inner_hidden = unknowns.overlap * column(facts.inner_hideable) * np.minimum(inner, BACKWARD * slowest)
        exposed, hidden = exposed + inner - inner_hidden, hidden + inner_hidden
    contended = unknowns.contention * column(facts.on_node) * hidden
    computing = mean + optimizer + codec / period + contended
    step = computing + slowest - mean + wait + exposed

    dropped = unknowns.compression_sensitivity * column(facts.information_loss)
    efficiency = _efficiency_of_sync(facts, unknowns) / ((1 + dropped) * (1 + column(format_loss[rows])))

    goodput = workload.global_batch / step * efficiency
    if not (np.isfinite(step).all() and (goodput > 0).all()):
        raise InvalidRequest(
            f"workload {workload.name} on cluster {cluster.name}: step times overflow; check "
            f"flops_per_sample={workload.flops_per_sample:g}, the device profiles and the links"
        )

    activations = facts.largest_share * workload.flops_per_sample / FLOPS_PER_ACTIVATION_BYTE
    needed = facts.state_bytes + activations * activation[rows]
    return Prediction(
        step_seconds=step,
        compute_seconds=computing,
        hidden_seconds=hidden,
        efficiency=efficiency,
        goodput=goodput,
        out_of_memory=column(needed) * unknowns.memory_factor > min(device.memory for device in devices),
        diverged=efficiency < DIVERGED_BELOW,
        demand=facts,
    )


def _efficiency_of_sync(facts: Demand, unknowns: Unknowns) -> Floats:
    """What is left of statistical efficiency where not all gradients are of the newest weights, [S, E]."""

    def rows(of: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return of[:, None]

    outer = facts.outer_rate > 0
    sensitivity = np.where(rows(outer), unknowns.outer_sensitivity, unknowns.period_sensitivity)
    needed: Floats = 1 + sensitivity * rows(facts.drift_steps)
    if outer.any():
        mismatch = np.log(rows(facts.outer_rate[outer]) / unknowns.best_outer_rate)
        needed[outer] *= 1 + OUTER_MISMATCH * np.square(mismatch)
    if facts.rested_steps.any():
        needed *= 1 + unknowns.rest_sensitivity * rows(facts.rested_steps)
    if facts.staleness.any():
        stale = unknowns.staleness_sensitivity * rows(facts.staleness * np.where(facts.damped, DAMPED, 1.0))
        needed *= 1 + stale + rows(np.where(facts.damped, SLOWED * np.maximum(0.0, facts.staleness - 1), 0.0))
    return 1 / needed
