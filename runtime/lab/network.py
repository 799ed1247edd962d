"""The links of a lab: veth pairs between namespaces, a bridge per switch, a token bucket per direction."""

import ipaddress
from dataclasses import dataclass, replace
from errno import EEXIST
from pathlib import Path
from socket import AF_INET

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from paceline.runtime.lab import namespace
from paceline.runtime.lab.file import CORE, LabFile

BRIDGE = "br0"
DATA_INTERFACE = "eth0"
"""In each node, what tensors go through."""
MANAGEMENT_INTERFACE = "mgmt0"
"""In each node, the unshaped way to the server."""
MANAGEMENT_BRIDGE = "mgmt"
DATA_NETWORK = ipaddress.IPv4Network("10.77.0.0/16")
MANAGEMENT_NETWORKS = tuple(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
"""The range set aside for benchmarks (RFC 2544), which no real network uses. Each lab takes one."""
UPLINK_INTERFACE = "up0"
"""In each rack, the way to the core switch."""
MTU = 9000
CONGESTION_CONTROL = "cubic"
"""What Linux uses unless it was told otherwise. Several flows share a short queue better than under bbr."""
"""B. With the usual 1500, headers take 4 % of what a link carries; with this, 0.7 %."""
QUEUE_SECONDS = 0.05
"""Length of the queue at a token bucket, which holds one large packet at least. A shorter one drops packets when
several senders meet, and TCP then waits for 0.2 s; behind a longer one, the messages that start an exchange wait for
the bulk of the last one."""
BURST_SECONDS = 0.002
"""A bucket holds what the link carries in this time, so that a late timer loses nothing."""
MIN_BURST = 2**16
"""B: the largest packet that TCP hands over in one piece."""
ROOT_HANDLE = 0x10000


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One direction of a link."""

    source: str
    """Node, rack or core switch that sends."""
    target: str
    """The one that receives."""
    interface: str
    """In the source's namespace, where the token bucket sits."""
    rate: float
    """B/s."""


class Network:
    """Builds the network of a lab and changes it. Its methods block, for milliseconds each."""

    def __init__(self, file: LabFile, owner: str) -> None:
        self._file = file
        self._owner = owner
        self._ports = {child: f"port{index}" for index, child in enumerate(file.wires)}
        self._addresses = dict(zip([CORE, *file.wires], DATA_NETWORK.hosts(), strict=False))
        self._hops: dict[tuple[str, str], Hop] = {}
        nodes = {node.name for node in file.nodes}
        for child, wire in file.wires.items():
            interface = DATA_INTERFACE if child in nodes else UPLINK_INTERFACE
            up = Hop(source=child, target=wire.parent, interface=interface, rate=wire.rates.up)
            down = Hop(source=wire.parent, target=child, interface=self._ports[child], rate=wire.rates.down)
            self._hops |= {(child, "up"): up, (child, "down"): down}
        self.host = ""
        """Address of the root namespace on the management network, once built."""

    def namespace(self, name: str) -> str:
        """Namespace of a node, rack or the core switch."""
        return f"{self._owner}-{name}"

    def address(self, name: str) -> str:
        """Address of a node's data interface or of a switch."""
        return str(self._addresses[name])

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Both directions of every link, as the file has them, up before down."""
        return tuple(self._hops.values())

    def build(self) -> None:
        """Make everything. Raises OSError or NetlinkError, and then leaves what it has made."""
        switches = [CORE, *(rack.name for rack in self._file.racks)]
        nodes = [node.name for node in self._file.nodes]
        for name in (*switches, *nodes):
            namespace.create(self.namespace(name))
            with namespace.inside(self.namespace(name)), IPRoute() as ip:
                ip.link("set", index=1, state="up")
        for name in switches:
            self._add_bridge(name, BRIDGE, address=self.address(name))
        self._add_bridge(CORE, MANAGEMENT_BRIDGE)
        for child, port in self._ports.items():
            hop = self._hops[child, "up"]
            self._connect(child, hop.interface, hop.target, port)
        subnet = self._claim_subnet()
        for index, name in enumerate(nodes):
            with namespace.inside(self.namespace(name)), IPRoute() as ip:
                (device,) = ip.link_lookup(ifname=DATA_INTERFACE)
                ip.addr("add", index=device, address=self.address(name), prefixlen=DATA_NETWORK.prefixlen)
                self._choose_congestion_control(ip, device, self.address(name))
                ip.link(
                    "add",
                    ifname=MANAGEMENT_INTERFACE,
                    kind="veth",
                    peer={"ifname": f"node{index}", "net_ns_fd": self.namespace(CORE)},
                )
                (device,) = ip.link_lookup(ifname=MANAGEMENT_INTERFACE)
                ip.addr("add", index=device, address=str(subnet[index + 2]), prefixlen=subnet.prefixlen)
                ip.link("set", index=device, state="up")
            self._plug(CORE, f"node{index}", MANAGEMENT_BRIDGE)
        for hop in self.hops:
            self._shape("add", hop)

    def _choose_congestion_control(self, ip: IPRoute, device: int, address: str) -> None:
        """Let connections of the data network behave alike whatever this machine has as its default."""
        if CONGESTION_CONTROL in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
            ip.route(
                "replace",
                dst=str(DATA_NETWORK),
                oif=device,
                prefsrc=address,
                scope="link",
                metrics={"cc_algo": CONGESTION_CONTROL},
            )

    def _add_bridge(self, name: str, bridge: str, *, address: str | None = None) -> None:
        with namespace.inside(self.namespace(name)), IPRoute() as ip:
            ip.link("add", ifname=bridge, kind="bridge")
            (index,) = ip.link_lookup(ifname=bridge)
            if address is not None:
                # Otherwise a bridge takes its hardware address from its ports, and changes it with them.
                hardware = "02:00:" + ipaddress.IPv4Address(address).packed.hex(":")
                ip.link("set", index=index, mtu=MTU, address=hardware)
                ip.addr("add", index=index, address=address, prefixlen=DATA_NETWORK.prefixlen)
            ip.link("set", index=index, state="up")

    def _connect(self, child: str, interface: str, parent: str, port: str) -> None:
        with namespace.inside(self.namespace(child)), IPRoute() as ip:
            peer = {"ifname": port, "net_ns_fd": self.namespace(parent), "mtu": MTU}
            ip.link("add", ifname=interface, kind="veth", mtu=MTU, peer=peer)
            (index,) = ip.link_lookup(ifname=interface)
            if bridge := ip.link_lookup(ifname=BRIDGE):
                ip.link("set", index=index, master=bridge[0])
            ip.link("set", index=index, state="up")
        self._plug(parent, port, BRIDGE)

    def _plug(self, name: str, port: str, bridge: str | None) -> None:
        with namespace.inside(self.namespace(name)), IPRoute() as ip:
            (index,), (master,) = ip.link_lookup(ifname=port), ip.link_lookup(ifname=bridge) if bridge else (0,)
            ip.link("set", index=index, master=master, state="up")

    def _claim_subnet(self) -> ipaddress.IPv4Network:
        """Join the root namespace to the management network, under a subnet that no other lab has."""
        with IPRoute() as ip:
            taken = [ipaddress.ip_address(each.get_attr("IFA_ADDRESS")) for each in ip.get_addr(family=AF_INET)]
            for index, subnet in enumerate(MANAGEMENT_NETWORKS):
                if any(address in subnet for address in taken):
                    continue
                name = f"paceline{index}"
                peer = {"ifname": "root", "net_ns_fd": self.namespace(CORE)}
                try:
                    # Only one process can make a link of this name, so it is what claims the subnet.
                    ip.link("add", ifname=name, kind="veth", peer=peer)
                except NetlinkError as error:
                    if error.code == EEXIST:
                        continue
                    raise
                (device,) = ip.link_lookup(ifname=name)
                self.host = str(subnet[1])
                ip.link("set", index=device, ifalias=self._owner)
                ip.addr("add", index=device, address=self.host, prefixlen=subnet.prefixlen)
                ip.link("set", index=device, state="up")
                break
            else:
                raise OSError(f"all {len(MANAGEMENT_NETWORKS)} management subnets are taken")
        self._plug(CORE, "root", MANAGEMENT_BRIDGE)
        return subnet

    def set_rate(self, child: str, direction: str, rate: float) -> None:
        """Change what the link of a node or rack carries `up` or `down`, B/s, while traffic flows or not."""
        self._shape("change", replace(self._hops[child, direction], rate=rate))

    def _shape(self, act: str, hop: Hop) -> None:
        burst = max(MIN_BURST, int(hop.rate * BURST_SECONDS))
        limit = burst + max(MIN_BURST, int(hop.rate * QUEUE_SECONDS))
        with namespace.inside(self.namespace(hop.source)), IPRoute() as ip:
            (index,) = ip.link_lookup(ifname=hop.interface)
            ip.tc(act, "tbf", index, handle=ROOT_HANDLE, rate=int(hop.rate), burst=burst, limit=limit)

    def set_connected(self, child: str, connected: bool) -> None:
        """Let a node's or rack's traffic pass, or drop it. Its interface stays up, so nobody is told."""
        bridge = BRIDGE if connected else None
        self._plug(self._file.wires[child].parent, self._ports[child], bridge)
