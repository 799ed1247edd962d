"""A vectorised cost model of one training step: S strategies under E draws of what the model does not know.

The exact part is in `demand.py`. Here is the rest: efficiencies, overlap, contention, stragglers, memory, and what a
strategy costs in statistical efficiency. All-reduce and all-gather are costed as rings (Thakur et al.,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19, 2005), on one level or on several that work
as a pipeline; buckets overlap the backward pass as in Li et al., "PyTorch Distributed" (arXiv:2006.15704).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline.env.demand import Bools, Demand, Floats, demand
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest

LAUNCH_SECONDS = 2e-5
"""Time per parameter tensor and step, whatever its size: launches of forward, backward and optimizer."""
BACKWARD = 2 / 3
"""Part of forward and backward that is backward."""
OPTIMIZER_PASSES = 7.0
"""Memory traffic of Adam, in passes over the fp32 parameters: read four tensors, write three."""
FLOPS_PER_ACTIVATION_BYTE = 500.0
"""FLOP of forward and backward per byte of activation kept: about the width of a transformer."""
BF16_LOSS = 0.01
"""What computing in bfloat16 costs in statistical efficiency."""
DIVERGED_BELOW = 0.15
"""Statistical efficiency below which a trial counts as diverged."""


@dataclass(frozen=True, kw_only=True)
class Unknowns:
    """E draws of what a probe does not tell; every array has shape [E]."""

    compute_efficiency: Floats
    """Part of the probed FLOP/s that the workload reaches."""
    link_efficiency: Floats
    """Part of the probed bandwidth that collectives reach; their latency grows by the same factor."""
    codec_cost: Floats
    """Time of the codecs relative to their memory traffic at the probed rate."""
    bf16_speed: Floats
    """Speed of forward and backward in bfloat16 relative to fp32; below 1 where it is emulated."""
    contention: Floats
    """Compute time lost per second of exchange hidden behind it, between CPU devices of one node."""
    overlap: Floats
    """Part of the possible overlap of exchange and backward pass that is reached."""
    pipelining: Floats
    """Part of the possible overlap of the levels of a hierarchical exchange that is reached."""
    period_sensitivity: Floats
    """Samples lost, relative, per local step between exchanges."""
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
            codec_cost=lognormal(1.0, 0.7),
            bf16_speed=np.exp(rng.uniform(np.log(0.15), np.log(4.0), count)),
            contention=rng.uniform(0.0, 1.0, count),
            overlap=rng.uniform(0.3, 1.0, count),
            pipelining=rng.uniform(0.5, 1.0, count),
            period_sensitivity=lognormal(0.02, 1.2),
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
    """Exchange hidden behind the backward pass, per step, s."""
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
    workload: WorkloadProfile, cluster: Cluster, strategies: Sequence[Strategy], unknowns: Unknowns
) -> Prediction:
    """Predict S strategies under E draws at once, with one rank per device. Unknown knobs have no effect.

    Raises IllegalStrategy or InvalidRequest as `demand` does, and InvalidRequest where the figures of workload and
    cluster are so far apart that they overflow.
    """
    facts = demand(workload, cluster, strategies)
    devices = [device.profile for device in cluster.devices]
    mem_bw = min(device.mem_bw for device in devices)

    def column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[:, None]

    bf16, period = column(facts.bf16), column(facts.period)
    speed = unknowns.compute_efficiency * np.where(bf16, unknowns.bf16_speed, 1.0)
    launches = workload.parameter_tensors * LAUNCH_SECONDS / unknowns.compute_efficiency
    mean = column(facts.mean_work) / speed + launches
    slowest = column(facts.slowest_work) / speed + launches
    # The largest of n normal variables is expected at sqrt(2 ln n); over a period of local steps jitter averages out.
    wait = slowest * unknowns.jitter * np.sqrt(2 * math.log(cluster.size) / period)
    optimizer = OPTIMIZER_PASSES * workload.gradient_bytes / mem_bw

    codec = unknowns.codec_cost * column(facts.codec_bytes) / mem_bw
    # Levels can work at once on all chunks but the one with which the pipeline fills.
    saved = column((1 - 1 / facts.chunks) * (facts.sequential_seconds - facts.pipelined_seconds))
    exchange = (column(facts.sequential_seconds) - unknowns.pipelining * saved) / unknowns.link_efficiency
    # The first bucket is full only after its part of the backward pass, and the last only when that is over.
    overlappable = column(facts.overlapped * (1 - 1 / facts.buckets)) * unknowns.overlap
    hidden = overlappable * np.minimum(exchange, BACKWARD * slowest)
    contended = unknowns.contention * column(facts.on_node) * hidden
    computing = mean + optimizer + (codec + contended) / period
    step = computing + slowest - mean + wait + (exchange - hidden) / period

    drift = unknowns.period_sensitivity * (period - 1)
    dropped = unknowns.compression_sensitivity * column(facts.information_loss)
    efficiency = 1 / ((1 + drift) * (1 + dropped) * (1 + BF16_LOSS * bf16))

    goodput = workload.global_batch / step * efficiency
    if not (np.isfinite(step).all() and (goodput > 0).all()):
        raise InvalidRequest(
            f"workload {workload.name} on cluster {cluster.name}: step times overflow; check "
            f"flops_per_sample={workload.flops_per_sample:g}, the device profiles and the links"
        )

    activations = facts.largest_share * workload.flops_per_sample / FLOPS_PER_ACTIVATION_BYTE
    needed = facts.state_bytes + activations * np.where(facts.bf16, 0.5, 1.0)
    return Prediction(
        step_seconds=step,
        compute_seconds=computing,
        hidden_seconds=hidden / period,
        efficiency=efficiency,
        goodput=goodput,
        out_of_memory=column(needed) * unknowns.memory_factor > min(device.memory for device in devices),
        diverged=efficiency < DIVERGED_BELOW,
        demand=facts,
    )
