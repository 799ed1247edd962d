"""What an exchange asks of the links of a cluster: how much each rank sends, and how busy that keeps each tier."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.mapping.levels import OUTERMOST


class LevelCost(NamedTuple):
    """One level of an exchange, per byte of payload."""

    seconds: float
    """Time of the level alone, s/B."""
    share: float
    """Largest share of the payload that a rank exchanges; 0 where nothing is sent."""
    rounds: float
    """Messages that a rank sends after each other, relative to a ring of all ranks."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """What an all-reduce costs at L levels of groups inside groups, the innermost first, per byte of payload.

    A flat all-reduce has one level. Seconds are at the measured rates, without latency.
    """

    levels: list[LevelCost]
    """The levels, [L]."""
    busy: list[list[float]]
    """Time that each level keeps each of K uplinks busy, s/B, [L, K]."""
    sent: list[list[float]]
    """Bytes that all ranks send at each level on each of T tiers, [L, T]."""
    on_node: bool
    """Whether devices of one node exchange with each other."""


class Network:
    """The tiers and links of a cluster, by device."""

    def __init__(self, cluster: Cluster) -> None:
        self.tiers = (*(tier.name for tier in cluster.tiers), OUTERMOST)
        self._name = cluster.name
        self._nodes = [device.node for device in cluster.devices]
        self._links = {(link.source, link.target): link for link in cluster.links}
        self._uplinks = [rate for tier in cluster.tiers for rate in tier.uplinks]
        # The way out of each device at each tier, as its place among the uplinks.
        self._ways: list[list[int]] = []
        first = 0
        for tier in cluster.tiers:
            way = {device: first + number for number, group in enumerate(tier.groups) for device in group}
            self._ways.append([way[device] for device in range(cluster.size)])
            first += len(tier.groups)

    def route(self, order: Sequence[int], levels: Sequence[Sequence[int]]) -> Route:
        """The route among ranks on the devices of `order`, with the group of each rank at each level but the last.

        At each level every group sums what its groups inside have summed, as `runtime.exchange.plan` lays it out.
        All routes of a cluster have as many levels, those beyond the last without traffic.
        Raises InvalidRequest where the cluster does not describe a link that the exchange uses.
        """
        depth = max(2, len(self.tiers))
        busy = [[0.0] * (1 + len(self._uplinks)) for _ in range(depth)]
        sent = [[0.0] * len(self.tiers) for _ in range(depth)]
        slowest, shares, rounds = ([0.0] * depth for _ in range(3))
        paths: dict[tuple[int, str, str], float] = {}
        on_node = False
        for level, rank, peer, peers, share, amount in _sendings(len(order), levels):
            sender, receiver = order[rank], order[peer]
            tier = 0
            for ways in self._ways:
                way = ways[sender]
                if way == ways[receiver]:
                    break
                busy[level][way] += amount / self._uplinks[way]
                tier += 1
            sent[level][tier] += amount
            source, target = self._nodes[sender], self._nodes[receiver]
            seconds = amount / self._rate(source, target)
            if source == target:
                on_node = True
            elif not self._ways:
                # Without measured tiers all that is known of a path's contention is its own traffic.
                path = (level, source, target)
                paths[path] = seconds = paths.get(path, 0.0) + seconds
            slowest[level] = max(slowest[level], seconds)
            shares[level] = max(shares[level], share)
            rounds[level] = max(rounds[level], peers / (len(order) - 1))
        seconds_alone = (max(path, *uplinks) for path, uplinks in zip(slowest, busy, strict=True))
        costs = [LevelCost(*cost) for cost in zip(seconds_alone, shares, rounds, strict=True)]
        return Route(levels=costs, busy=busy, sent=sent, on_node=on_node)

    def _rate(self, source: str, target: str) -> float:
        """Rate between two nodes, or inside one, as far as these two decide it, B/s; see `ring_rate`."""
        link = self._links.get((source, target))
        if link is None:
            raise InvalidRequest(f"cluster {self._name} describes no link {source}->{target}; probe it again")
        return link.alone if self._ways and source != target else link.bandwidth


def _sendings(size: int, levels: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int, float, float]]:
    """What each rank sends at each level where it sends.

    Yields level, rank, one of the peers that it sends to (all of them are in other groups of the same level), the
    peers' number, the share of the payload that rank and peers sum up, and what the rank sends in all, as a share of
    the payload. A flat all-reduce sends as much, but all to the next rank.
    """
    shares = [1.0] * size
    for level, (inner, outer) in enumerate(itertools.pairwise([range(size), *levels, (0,) * size])):
        teams: dict[int, dict[int, list[int]]] = {}
        for rank, labels in enumerate(zip(outer, inner, strict=True)):
            teams.setdefault(labels[0], {}).setdefault(labels[1], []).append(rank)
        # As many parts as the widest team has groups: in a narrower one some groups are responsible for several.
        parts = max(len(groups) for groups in teams.values())
        for groups in teams.values():
            members = list(groups.values())
            count = len(members)
            if count == 1:
                continue
            taken = [0] * count
            for part in range(parts):
                taken[part * count // parts] += 1
            for place, group in enumerate(members):
                following = members[(place + 1) % count]
                # The others' parts to them, and the sum of its own parts to each of them.
                sent = (parts - taken[place] + taken[place] * (count - 1)) / parts
                for seat, rank in enumerate(group):
                    share = shares[rank]
                    yield level, rank, following[seat % len(following)], count - 1, share, share * sent
                    shares[rank] = share * taken[place] / parts
