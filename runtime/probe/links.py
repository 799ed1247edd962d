"""Measure the links between nodes and the tiers they form, given a way to run flows between devices."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from paceline.runtime.domain.cluster import Link, Tier
from paceline.runtime.probe.racks import Floats, find_racks
from paceline.runtime.probe.rounds import Pair, ring, shift, tournament


@dataclass(frozen=True, kw_only=True)
class FlowRate:
    """What a flow reached."""

    bandwidth: float
    """B/s."""
    latency: float
    """Half a round trip of a small message before the bytes flowed, s."""


RunFlows = Callable[[Sequence[Pair]], Awaitable[Mapping[Pair, FlowRate]]]
"""Runs flows between devices, all at once, each given as (sender, receiver)."""


async def measure_links(nodes: Mapping[str, Sequence[int]], run: RunFlows) -> tuple[tuple[Link, ...], tuple[Tier, ...]]:
    """The links and tiers of nodes, each with its device indices. Nothing is run for a single node with one device.

    n nodes take about n rounds: a tournament in which every pair meets once while all others exchange, too; one in
    which all nodes exchange inside; and for racks, two in which everybody sends to another rack, and one run alone for
    each pair of neighbouring racks.
    """
    names, members = list(nodes), list(nodes.values())
    links = await _inside(names, members, run)
    if len(names) == 1:
        return tuple(links), ()
    rates, latencies = await _between(members, run)
    racks = find_racks(rates)
    capacity = np.minimum(rates.max(axis=1), rates.max(axis=0))
    alone = rates.copy()
    tiers = [
        Tier(name="node", groups=tuple(tuple(sorted(each)) for each in members), uplinks=tuple(map(float, capacity)))
    ]
    if len(racks) > 1:
        groups = [[device for node in rack for device in members[node]] for rack in racks]
        uplinks = await _ways_out(groups, run)
        tiers.append(Tier(name="rack", groups=tuple(tuple(sorted(group)) for group in groups), uplinks=uplinks))
        await _measure_alone(alone, racks, members, capacity, run)
    for index, source in enumerate(names):
        links += [
            Link(
                source=source,
                target=target,
                bandwidth=float(rates[index, other]) / max(len(members[index]), len(members[other])),
                alone=float(max(alone[index, other], rates[index, other])),
                latency=float(latencies[index, other]),
            )
            for other, target in enumerate(names)
            if other != index
        ]
    return tuple(links), tuple(tiers)


async def _inside(names: Sequence[str], members: Sequence[Sequence[int]], run: RunFlows) -> list[Link]:
    """Between the devices of a node, all nodes at once."""
    flows = [flow for devices in members for flow in ring(devices)]
    if not flows:
        return []
    measured = await run(flows)
    links = []
    for name, devices in zip(names, members, strict=True):
        if own := [measured[flow] for flow in ring(devices)]:
            rate = float(np.median([each.bandwidth for each in own]))
            latency = float(np.median([each.latency for each in own]))
            links.append(Link(source=name, target=name, bandwidth=rate, alone=rate, latency=latency))
    return links


async def _between(members: Sequence[Sequence[int]], run: RunFlows) -> tuple[Floats, Floats]:
    """Rates of all devices of a node together and their latencies, between nodes, [n, n]; 0 on the diagonal."""
    count = len(members)
    rates, latencies = np.zeros((count, count)), np.zeros((count, count))
    node_of = {device: node for node, devices in enumerate(members) for device in devices}
    for pairs in tournament(count):
        measured = await run([flow for pair in pairs for flow in shift([members[node] for node in pair], 1)])
        for (source, target), flow in measured.items():
            where = node_of[source], node_of[target]
            rates[where] += flow.bandwidth
            latencies[where] = max(latencies[where], flow.latency)
    return rates, latencies


async def _ways_out(groups: Sequence[Sequence[int]], run: RunFlows) -> tuple[float, ...]:
    """What leaves or enters each group, whichever is less, while every device exchanges with another group."""
    leaving, entering = np.zeros(len(groups)), np.zeros(len(groups))
    # To both neighbours in turn, as a slow one would hide what a group can do.
    for by in {1, len(groups) - 1}:
        flows = shift(groups, by)
        measured = await run(list(dict.fromkeys(flows)))
        out, into = np.zeros(len(groups)), np.zeros(len(groups))
        for (source, target), rate in measured.items():
            out[_holder(groups, source)] += rate.bandwidth
            into[_holder(groups, target)] += rate.bandwidth
        leaving, entering = np.maximum(leaving, out), np.maximum(entering, into)
    return tuple(float(rate) for rate in np.minimum(leaving, entering))


async def _measure_alone(
    alone: Floats,
    racks: Sequence[Sequence[int]],
    members: Sequence[Sequence[int]],
    capacity: Floats,
    run: RunFlows,
) -> None:
    """Fill in what pairs in different racks reach with nobody else: the least of both nodes' and both racks' ways out.

    Inside a rack a pair of the tournament has its links to itself.
    """
    out = np.zeros(len(racks))
    for index in range(len(racks) if len(racks) > 2 else 1):
        other = (index + 1) % len(racks)
        a, b = (members[max(racks[each], key=lambda node: capacity[node])][0] for each in (index, other))
        measured = await run([(a, b), (b, a)])
        slowest = min(rate.bandwidth for rate in measured.values())
        out[index], out[other] = max(out[index], slowest), max(out[other], slowest)
    rack_of = {node: index for index, rack in enumerate(racks) for node in rack}
    for a, b in permutations(rack_of, 2):
        if rack_of[a] != rack_of[b]:
            alone[a, b] = min(capacity[a], capacity[b], out[rack_of[a]], out[rack_of[b]])


def _holder(groups: Sequence[Sequence[int]], device: int) -> int:
    return next(index for index, group in enumerate(groups) if device in group)
