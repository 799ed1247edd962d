"""A network on paper: what flows reach in it, and a profile of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.runtime.domain.cluster import Cluster, Device, DeviceProfile, Link, Tier
from paceline.runtime.probe.links import FlowRate
from paceline.runtime.probe.rounds import Pair

LATENCY = 1e-3
INSIDE = 1000.0
"""Rate between devices of a node."""


@dataclass
class TreeNetwork:
    """Nodes in racks on a core switch; flows that run at once share each link max-min fairly."""

    homes: Sequence[str]
    """Node of each device."""
    racks: Mapping[str, str]
    """Rack of each node."""
    up: Mapping[str, float]
    """What the link of a node or rack carries towards the core."""
    down: Mapping[str, float]
    """And away from it."""
    sender: float = math.inf
    """What a device can send to other nodes."""
    runs: list[Sequence[Pair]] = field(default_factory=list)
    """All flows that were run."""

    async def run(self, flows: Sequence[Pair]) -> Mapping[Pair, FlowRate]:
        """As a probe runs them."""
        self.runs.append(flows)
        paths = {flow: set(self._path(*flow)) for flow in flows}
        free = {link: self._capacity(link) for path in paths.values() for link in path}
        rates: dict[Pair, float] = {}
        while waiting := paths.keys() - rates.keys():
            users = {link: [flow for flow in waiting if link in paths[flow]] for link in free}
            tight = min((link for link in free if users[link]), key=lambda link: free[link] / len(users[link]))
            rate = free[tight] / len(users[tight])
            for flow in users[tight]:
                rates[flow] = rate
                for link in paths[flow]:
                    free[link] -= rate
        return {flow: FlowRate(bandwidth=rate, latency=LATENCY) for flow, rate in rates.items()}

    def _path(self, source: int, target: int) -> Iterator[tuple[str, str]]:
        node, other = self.homes[source], self.homes[target]
        if node == other:
            yield f"{source}>{target}", "inside"
            return
        yield str(source), "out"
        yield node, "up"
        if self.racks[node] != self.racks[other]:
            yield self.racks[node], "up"
            yield self.racks[other], "down"
        yield other, "down"

    def _capacity(self, link: tuple[str, str]) -> float:
        name, direction = link
        match direction:
            case "inside":
                return INSIDE
            case "out":
                return self.sender
            case _:
                return {"up": self.up, "down": self.down}[direction][name]


def two_racks(*, flops: Sequence[float] = (1e10,) * 4, uplink: float = 12.5e6) -> Cluster:
    """A profile of two racks of two nodes, listed alternately."""
    nodes = ("e0", "w0", "e1", "w1")
    return Cluster(
        name="lab:two-racks",
        devices=tuple(
            Device(
                name=f"{node}/cpu0",
                node=node,
                kind="cpu",
                profile=DeviceProfile(
                    flops=each,
                    mem_bw=4e9,
                    net_latency=1e-3,
                    pcie_bw=0.0,
                    memory=2**30,
                    codec_rates={"fp16": 2e9, "topk": 3e8},
                ),
            )
            for node, each in zip(nodes, flops, strict=True)
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth=50e6 if a[0] == b[0] else uplink / 2, alone=50e6, latency=LATENCY)
            for a in nodes
            for b in nodes
            if a != b
        ),
        tiers=(
            Tier(name="node", groups=((0,), (1,), (2,), (3,)), uplinks=(50e6,) * 4),
            Tier(name="rack", groups=((0, 2), (1, 3)), uplinks=(uplink, uplink)),
        ),
    )
