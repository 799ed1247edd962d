"""Measure a whole cluster through its workers."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.convert import from_message
from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.errors import WorkerFailure
from paceline.runtime.launch.base import DeviceSlot, Launcher
from paceline.runtime.probe.links import FlowRate, RunFlows, measure_links
from paceline.runtime.probe.rounds import Pair
from paceline.runtime.server.fleet import Worker, WorkerError, WorkerLost, call_all

POOL_SECONDS = 0.15
"""Time per figure of a device that shares its cores: the mean over its pool counts."""
OWN_SECONDS = 0.6
"""The same for one with cores of its own: with a quota of 4 ms in every 20, it takes 30 periods to be right to 5 %."""
FLOW_SECONDS = 0.5
CHUNK = 2**16
"""Small enough that a share of a slow link still is many chunks, B."""
LOCAL_CHUNK = 2**20
"""Large enough that what a chunk costs beside its bytes does not count inside a machine, B."""


async def probe_cluster(launcher: Launcher, workers: Sequence[Worker], plan: control_pb2.Plan) -> Cluster:
    """Measure devices and links; `workers` are one per slot and idle. Raises WorkerFailure."""
    slots = launcher.slots
    is_pool = len({slot.pool for slot in slots}) < len(slots)
    measure = control_pb2.Command.MeasureDevice(plan=plan, seconds=POOL_SECONDS if is_pool else OWN_SECONDS)
    try:
        answers = [answer.measured for answer in await call_all(workers, measure=measure)]
        links, tiers = await _measure_links([slot.node for slot in slots], workers)
    except (WorkerLost, WorkerError) as error:
        raise WorkerFailure(f"the cluster could not be measured: {error}") from error
    profiles = [from_message(answer.profile, DeviceProfile) for answer in answers]
    devices = tuple(
        Device(name=slot.name, node=slot.node, kind=answer.kind, profile=_of_pool(slot, slots, profiles, profile))
        for slot, answer, profile in zip(slots, answers, profiles, strict=True)
    )
    return Cluster(name=launcher.reference, devices=devices, links=links, tiers=tiers)


async def probe_links_again(cluster: Cluster, workers: Sequence[Worker]) -> Cluster:
    """The cluster with its links and tiers measured anew by the ranks of a trial that stand at a barrier.

    Where they do not hold all devices, everything stays as it was. Raises WorkerLost or WorkerError.
    """
    if len(workers) < cluster.size:
        return cluster
    links, tiers = await _measure_links([device.node for device in cluster.devices], workers)
    return dataclasses.replace(cluster, links=links, tiers=tiers)


async def _measure_links(homes: Sequence[str], workers: Sequence[Worker]) -> tuple[tuple[Link, ...], tuple[Tier, ...]]:
    """`homes`: the node of each device."""
    nodes: dict[str, list[int]] = {}
    for index, home in enumerate(homes):
        nodes.setdefault(home, []).append(index)
    return await measure_links(nodes, _flows_of(workers, homes))


def _flows_of(workers: Sequence[Worker], homes: Sequence[str]) -> RunFlows:
    """Runs flows on workers that are the ranks of one group, in this order."""
    ranks = {worker.device: rank for rank, worker in enumerate(workers)}

    async def run(flows: Sequence[Pair]) -> Mapping[Pair, FlowRate]:
        command = control_pb2.Command.ProbeLinks(
            flows=[control_pb2.Flow(source=ranks[source], target=ranks[target]) for source, target in flows],
            seconds=FLOW_SECONDS,
            chunk_bytes=LOCAL_CHUNK if all(homes[source] == homes[target] for source, target in flows) else CHUNK,
        )
        answers = await call_all(workers, probe_links=command)
        return {
            (workers[flow.source].device, worker.device): FlowRate(bandwidth=flow.bandwidth, latency=flow.latency)
            for worker, answer in zip(workers, answers, strict=True)
            for flow in answer.probed.flows
        }

    return run


def _of_pool(
    slot: DeviceSlot, slots: Sequence[DeviceSlot], profiles: Sequence[DeviceProfile], own: DeviceProfile
) -> DeviceProfile:
    """A device's profile with the mean speed of its pool, and no more memory than it may use."""
    pool = [profile for other, profile in zip(slots, profiles, strict=True) if other.pool == slot.pool]
    return dataclasses.replace(
        own,
        flops=statistics.fmean(profile.flops for profile in pool),
        mem_bw=statistics.fmean(profile.mem_bw for profile in pool),
        net_latency=statistics.median(profile.net_latency for profile in pool),
        memory=min(own.memory, slot.memory or own.memory),
        codec_rates={
            codec: statistics.fmean(profile.codec_rates[codec] for profile in pool) for codec in own.codec_rates
        },
    )
