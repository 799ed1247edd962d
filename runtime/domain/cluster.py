"""Nodes, devices and links, with what a probe measured of them."""

import math
from dataclasses import dataclass, field

from paceline.runtime.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What one device can do. Every figure is measured with all devices of the cluster busy at once."""

    flops: float
    """fp32 matrix-multiply rate, FLOP/s."""
    mem_bw: float
    """Memory copy rate, B/s, reads plus writes."""
    net_latency: float
    """Time of a one-element all-reduce over all devices, s."""
    pcie_bw: float
    """Host-to-device copy rate, B/s; 0.0 where host and device share memory."""
    memory: float
    """Memory available to the device's worker, B."""
    codec_rates: dict[str, float] = field(default_factory=dict)
    """Rate at which each codec, by name, encodes and decodes at its default knobs, B/s of fp32. Without those that
    change nothing; empty where it was not measured."""

    def __post_init__(self) -> None:
        for name in ("flops", "mem_bw", "memory"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"device profile: {name}={value} must be positive and finite")
        for name in ("net_latency", "pcie_bw"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidRequest(f"device profile: {name}={value} must be finite and not negative")
        for name, rate in self.codec_rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise InvalidRequest(f"device profile: codec_rates[{name}]={rate} must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place where a worker runs."""

    name: str
    """Unique in the cluster, e.g. `localhost/cpu0`."""
    node: str
    """Name of the node it sits in."""
    kind: str
    """`cpu`, or `cuda:` and the compute capability, as in `cuda:9.0`."""
    profile: DeviceProfile
    """What the probe measured."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A directed path between two nodes, or inside one."""

    source: str
    """Node that sends."""
    target: str
    """Node that receives; equal to `source` for traffic between devices of one node."""
    bandwidth: float
    """Sustained rate of one rank's traffic while every rank exchanges at once, B/s."""
    alone: float
    """The same while nobody else exchanges, B/s."""
    latency: float
    """One-way time of a small message, s."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "alone"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"link {self.source}->{self.target}: {name}={value} must be positive and finite")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise InvalidRequest(f"link {self.source}->{self.target}: latency must be finite, not negative")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of the network: groups of devices, each with its own way out to the other groups."""

    name: str
    """What a group is, `node` or `rack`; also the name of the traffic inside the groups that no inner tier carries."""
    groups: tuple[tuple[int, ...], ...]
    """Device indices of each group, ascending; every device is in exactly one."""
    uplinks: tuple[float, ...]
    """Rate of each group's way out, in each direction, with all its devices exchanging with other groups at once,
    B/s."""

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.uplinks) or not all(math.isfinite(rate) and rate > 0 for rate in self.uplinks):
            raise InvalidRequest(f"tier {self.name}: needs one positive, finite uplink per group")

    def group_of(self, device: int) -> int:
        """Index of the group that holds the device."""
        return next(index for index, group in enumerate(self.groups) if device in group)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All devices of one runtime, in the order in which its launcher numbers them."""

    name: str
    """Launcher and size, e.g. `local:4`."""
    devices: tuple[Device, ...]
    """Index in this tuple = device index in `mapping.order`."""
    links: tuple[Link, ...]
    """Measured links between (and inside) nodes."""
    tiers: tuple[Tier, ...] = ()
    """Levels of the network, the innermost first, each group of a tier inside one group of the next; without those that
    have a single group. Empty where all devices sit in one node."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise InvalidRequest(f"cluster {self.name} has no devices")
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise InvalidRequest(f"cluster {self.name}: device names must be unique, got {', '.join(names)}")
        inner: tuple[tuple[int, ...], ...] = tuple((index,) for index in range(self.size))
        for tier in self.tiers:
            if sorted(index for group in tier.groups for index in group) != list(range(self.size)):
                raise InvalidRequest(f"cluster {self.name}: tier {tier.name} must hold every device exactly once")
            if any(len({tier.group_of(index) for index in group}) > 1 for group in inner):
                raise InvalidRequest(f"cluster {self.name}: tier {tier.name} splits a group of the tier inside it")
            inner = tier.groups

    @property
    def size(self) -> int:
        """Number of devices: the largest world size."""
        return len(self.devices)
