"""What an exchange asks of the links of a cluster: how much is sent, and how busy that keeps each tier."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from paceline.env.forms import Floats, Form, Ints
from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.mapping.levels import OUTERMOST


@dataclass(frozen=True, kw_only=True)
class Route:
    """What an exchange costs on L legs, per byte of what is exchanged, at the measured rates and without latency."""

    seconds: Floats
    """Time of each leg alone, s/B, [L]."""
    shares: Floats
    """As in `Form`, [L]."""
    rounds: Floats
    """As in `Form`, [L]."""
    busy: Floats
    """Time that each leg keeps each of K uplinks busy, s/B, [L, K]."""
    sent: Floats
    """Bytes sent by all on each leg on each of T tiers, [L, T]."""
    on_node: bool
    """Whether devices of one node exchange with each other."""


@dataclass(frozen=True)
class _Same:
    """Equal for the same object only: to compare two clusters takes longer than to find a route."""

    identity: int
    cluster: Cluster = field(compare=False)


def network_of(cluster: Cluster) -> "Network":
    """The network of a cluster; while it is among the last ones asked for, with the routes that are known already."""
    return _network_of(_Same(id(cluster), cluster))


@lru_cache(16)
def _network_of(same: _Same) -> "Network":
    return Network(same.cluster)


class Network:
    """The tiers and links of a cluster, by device."""

    def __init__(self, cluster: Cluster) -> None:
        self.tiers = (*(tier.name for tier in cluster.tiers), OUTERMOST)
        self.legs = max(2, len(self.tiers))
        self._routes: dict[tuple[tuple[int, ...], Form], Route] = {}
        self._cluster = cluster
        names = list(dict.fromkeys(device.node for device in cluster.devices))
        number = {name: index for index, name in enumerate(names)}
        self._nodes = np.array([number[device.node] for device in cluster.devices])
        # Between two nodes with nobody else sending, where the tiers say what all together can.
        self._rates = np.full((len(names), len(names)), np.nan)
        for link in cluster.links:
            if link.source in number and link.target in number:
                alone = cluster.tiers and link.source != link.target
                self._rates[number[link.source], number[link.target]] = link.alone if alone else link.bandwidth
        self._has_gaps = bool(np.isnan(self._rates).any())
        self._uplinks = np.array([rate for tier in cluster.tiers for rate in tier.uplinks])
        # The way out of each device at each tier, as its place among the uplinks.
        self._ways = np.zeros((len(cluster.tiers), cluster.size), dtype=np.intp)
        first = 0
        for row, tier in enumerate(cluster.tiers):
            for group, members in enumerate(tier.groups):
                self._ways[row, list(members)] = first + group
            first += len(tier.groups)

    def route(self, devices: Sequence[int], form: Form) -> Route:
        """The route of an exchange among processes on these devices.

        All routes of a cluster have as many legs, those beyond the form's without traffic. Raises InvalidRequest where
        the cluster does not describe a link that the exchange uses.
        """
        key = (tuple(devices), form)
        if key not in self._routes:
            self._routes[key] = self._find_route(devices, form)
        return self._routes[key]

    def _find_route(self, devices: Sequence[int], form: Form) -> Route:
        placed = np.array(devices)
        source, target = placed[form.sender], placed[form.receiver]
        ways = self._ways[:, source]
        leaves = ways != self._ways[:, target]
        tier, flow = leaves.nonzero()
        # Every form takes in what it sends out, so one direction says all.
        busy = self._sums(form.leg[flow], ways[tier, flow], form.amount[flow], len(self._uplinks)) / self._uplinks
        seconds, on_node = self._path_seconds(form, source, target)
        beyond = [0.0] * (self.legs - len(form.shares))
        return Route(
            seconds=np.maximum(seconds, busy.max(axis=1, initial=0.0)),
            shares=np.array([*form.shares, *beyond]),
            rounds=np.array([*form.rounds, *beyond]),
            busy=busy,
            sent=self._sums(form.leg, leaves.sum(axis=0), form.amount, len(self.tiers)),
            on_node=on_node,
        )

    def _sums(self, leg: Ints, place: Ints, amounts: Floats, places: int) -> Floats:
        """Sums of amounts by leg and place, [L, places]."""
        sums = np.bincount(leg * places + place, amounts, self.legs * places).astype(np.float64, copy=False)
        return sums.reshape(self.legs, places)

    def _path_seconds(self, form: Form, source: Ints, target: Ints) -> tuple[Floats, bool]:
        """Time of each leg as far as the two ends of each path decide it, s/B, [L]; whether any is inside a node."""
        starts, ends = self._nodes[source], self._nodes[target]
        seconds = form.amount / self._rates[starts, ends]
        if self._has_gaps and np.isnan(seconds).any():
            flow = int(np.argmax(np.isnan(seconds)))
            a, b = (self._cluster.devices[int(each[flow])].node for each in (source, target))
            raise InvalidRequest(f"cluster {self._cluster.name} describes no link {a}->{b}; probe it again")
        inside = starts == ends
        between = np.where(inside, 0.0, seconds)
        if self._cluster.tiers:
            slowest = np.zeros(self.legs)
            np.maximum.at(slowest, form.leg, between)
        else:
            # All that is known of a path's contention is its own traffic.
            nodes = len(self._rates)
            slowest = self._sums(form.leg, starts * nodes + ends, between, nodes**2).max(axis=1)
        on_node = bool(inside.any())
        if on_node:
            own = self._sums(form.leg, source, seconds - between, len(self._nodes))
            slowest = np.maximum(slowest, own.max(axis=1))
        return slowest, on_node
