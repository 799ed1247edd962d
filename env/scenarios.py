"""Random clusters and workloads to train on: loopback, labs of CPU shares on slow links, GPUs on a fast fabric."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.env.codecs import PRIORS
from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.domain.workload import WorkloadProfile

MAX_DEVICES = 64
"""Largest cluster that is drawn."""
LAB_PARAMETERS = (1e5, 1e7)
"""Parameters of workloads that are often put on a cluster like those of the lab."""
LAB_RATES = (1.25e6, 1.25e8)
"""Rates of a lab's links, B/s: 10 Mbit/s to 1 Gbit/s."""
RATES = (1e6, 1e11)
"""Rates of other links, B/s."""
CAPABILITIES = ("7.0", "8.0", "9.0")
"""Compute capabilities of CUDA devices."""
CODEC_SPREAD = 0.5
"""Standard deviation of the log of a codec's rate around what is assumed of it."""


def random_workload(rng: np.random.Generator) -> WorkloadProfile:
    """A workload of 1e4 to 1e8 parameters, log-uniform, each used up to a thousand times per sample."""
    parameters = int(_log_uniform(rng, 1e4, 1e8))
    samples = int(_log_uniform(rng, 1e3, 1e6))
    return WorkloadProfile(
        name="simulated",
        doc="A workload drawn for the simulator.",
        global_batch=int(2 ** rng.integers(4, 10)),
        train_samples=samples,
        heldout_samples=max(1, samples // 10),
        parameters=parameters,
        parameter_tensors=int(_log_uniform(rng, 4, 300)),
        flops_per_sample=6 * parameters * _log_uniform(rng, 1, 1000),
    )


def random_cluster(rng: np.random.Generator, workload: WorkloadProfile) -> Cluster:
    """A cluster of 2 to MAX_DEVICES devices, no more than the workload has samples per step.

    It has one to four racks of one to eight nodes of one to four devices, alike or not, and lists its devices in the
    order of racks and nodes or in any other. The links are drawn last, so that one exchange takes between 1/50 and 20
    times as long as the computation that it belongs to: outside this range there is nothing to tune.
    """
    lab = LAB_PARAMETERS[0] <= workload.parameters <= LAB_PARAMETERS[1] and rng.random() < 0.6
    rack_of, homes = _layout(rng, min(MAX_DEVICES, workload.global_batch), lab=lab)
    devices = _devices(rng, homes, lab=lab)
    compute = workload.flops_per_sample * workload.global_batch / sum(device.profile.flops for device in devices)
    narrowest = 2 * workload.gradient_bytes / (compute * _log_uniform(rng, 0.02, 20.0))
    inside, tiers = _network(rng, rack_of, homes, narrowest, LAB_RATES if lab else RATES)
    latency = devices[0].profile.net_latency / (2 * len(devices) - 2)
    return Cluster(
        name=f"simulated:{len(devices)}",
        devices=devices,
        links=tuple(_links(rack_of, homes, inside, tiers, latency)),
        tiers=tiers,
    )


def _layout(rng: np.random.Generator, most: int, *, lab: bool) -> tuple[list[int], list[int]]:
    """Rack of each node, and node of each device in the order in which the scheduler lists them."""
    while True:
        racks = int(rng.integers(1, 3 if lab else 5))
        nodes, devices = (int(_log_uniform(rng, 1, limit + 1)) for limit in (8, 2 if lab else 4))
        if rng.random() < 0.15:
            racks = nodes = 1
        rack_of = [rack for rack in range(racks) for _ in range(nodes)]
        # Racks are alike, but the last may lack a node.
        if rng.random() < 0.2:
            del rack_of[-1]
        if 2 <= len(rack_of) * devices <= most and not (lab and len(rack_of) > 8):
            break
    listed = rng.permutation(len(rack_of)) if rng.random() < 0.7 else np.arange(len(rack_of))
    homes = np.repeat(listed, devices)
    if rng.random() < 0.2:
        rng.shuffle(homes)
    return rack_of, homes.tolist()


def _devices(rng: np.random.Generator, homes: Sequence[int], *, lab: bool) -> tuple[Device, ...]:
    """The devices of the nodes: all alike, of a few kinds, or each a little different."""
    count = len(homes)
    cuda = not lab and rng.random() < 0.4
    kind = f"cuda:{rng.choice(CAPABILITIES)}" if cuda else "cpu"
    if lab:
        cores = _log_uniform(rng, 0.1, 1.0)
        flops, mem_bw, latency = cores * _log_uniform(rng, 1e10, 1e11), cores * _log_uniform(rng, 4e9, 2e10), 1e-3
    elif cuda:
        flops, mem_bw, latency = _log_uniform(rng, 1e12, 1e14), _log_uniform(rng, 2e11, 2e12), 1e-4
    else:
        flops, mem_bw, latency = _log_uniform(rng, 2e9, 5e11), _log_uniform(rng, 4e9, 4e10), 1e-4
    latency *= 2 * (count - 1) * _log_uniform(rng, 0.1, 10.0)
    speeds = np.ones(count)
    mixed = rng.random()
    if mixed < 0.4:
        speeds = rng.choice([1.0, 0.5, 0.25], max(homes) + 1)[list(homes)]
    elif mixed < 0.6:
        speeds = np.exp(rng.uniform(math.log(0.33), 0.0, count))
    codec_rates = {
        codec: mem_bw / (prior.passes * math.exp(CODEC_SPREAD * rng.standard_normal()))
        for codec, prior in PRIORS.items()
        if prior.passes
    }
    return tuple(
        Device(
            name=f"node{node}/{'cuda' if cuda else 'cpu'}{index}",
            node=f"node{node}",
            kind=kind,
            profile=DeviceProfile(
                flops=flops * float(speed),
                # A share of a core is a share of its memory traffic too; kinds of GPU differ in both alike.
                mem_bw=mem_bw * float(speed),
                net_latency=latency,
                pcie_bw=1.2e10 if cuda else 0.0,
                memory=_log_uniform(rng, 2e8, 4e9) if lab else _log_uniform(rng, 2e9, 8e10),
                codec_rates={codec: rate * float(speed) for codec, rate in codec_rates.items()},
            ),
        )
        for index, (node, speed) in enumerate(zip(homes, speeds, strict=True))
    )


def _network(
    rng: np.random.Generator,
    rack_of: Sequence[int],
    homes: Sequence[int],
    narrowest: float,
    rates: tuple[float, float],
) -> tuple[float, tuple[Tier, ...]]:
    """Rate of one device's traffic inside a node, B/s, and the tiers, whose uplinks may differ.

    `narrowest` is the rate of the slower kind of uplink before some of them are made slower still; all rates are kept
    within `rates`.
    """
    nodes, racks = len(rack_of), max(rack_of) + 1
    # How many times more the nodes of a rack can send than the rack.
    oversubscription = _log_uniform(rng, 1.5, 30.0)
    rack = nodes / racks / oversubscription
    scale = narrowest / (min(1.0, rack) if racks > 1 else 1.0)

    def tier(name: str, group_of: Sequence[int], rate: float) -> Tier:
        groups = [tuple(np.flatnonzero(np.array(group_of) == group).tolist()) for group in range(max(group_of) + 1)]
        uplinks = np.full(len(groups), rate * scale)
        if rng.random() < 0.3:
            uplinks *= np.exp(rng.uniform(math.log(0.3), 0.0, len(groups)))
        if rng.random() < 0.2:
            uplinks[rng.integers(len(groups))] *= _log_uniform(rng, 0.05, 0.5)
        return Tier(name=name, groups=tuple(groups), uplinks=tuple(np.clip(uplinks, *rates).tolist()))

    tiers = []
    if nodes > 1:
        tiers.append(tier("node", homes, 1.0))
    if racks > 1:
        tiers.append(tier("rack", [rack_of[node] for node in homes], rack))
    inside = scale * (_log_uniform(rng, 1.0, 20.0) if nodes > 1 else 1.0)
    return float(np.clip(inside, rates[0], RATES[1])), tuple(tiers)


def _links(
    rack_of: Sequence[int], homes: Sequence[int], inside: float, tiers: Sequence[Tier], latency: float
) -> Iterator[Link]:
    """A link for each pair of nodes, as wide as the uplinks on its way, alone and with all devices sending."""
    for source, target in itertools.product(range(len(rack_of)), repeat=2):
        if source == target:
            alone = shared = inside
        else:
            way = [(tiers[0], source), (tiers[0], target)]
            if rack_of[source] != rack_of[target]:
                way += [(tiers[1], rack_of[source]), (tiers[1], rack_of[target])]
            alone = min(tier.uplinks[group] for tier, group in way)
            shared = min(tier.uplinks[group] / len(tier.groups[group]) for tier, group in way)
        yield Link(source=f"node{source}", target=f"node{target}", bandwidth=shared, alone=alone, latency=latency)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))
