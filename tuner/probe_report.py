"""A cluster profile for its readers: tables, and a heat map of the rates between nodes."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.probe.balance import device_balance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm

READABLE_NODES = 16
"""Nodes up to which the rate of each pair is written out."""
BITS = 8e-6
"""Mbit/s per B/s."""
INCHES_PER_NODE = 0.55
PANEL_INCHES = (3.2, 9.0)
"""Least and greatest size of a panel."""

Matrix = npt.NDArray[np.float64]


def as_tables(cluster: Cluster) -> Iterator[Table]:
    """Devices, codecs, tiers, and the rates between nodes where there are few enough of them to read."""
    yield _devices(cluster)
    if any(device.profile.codec_rates for device in cluster.devices):
        yield _codecs(cluster)
    if cluster.tiers:
        yield _tiers(cluster)
    nodes = nodes_by_tiers(cluster)
    if len(nodes) <= READABLE_NODES:
        yield _rates(cluster, nodes)


def nodes_by_tiers(cluster: Cluster) -> list[str]:
    """All nodes, those of a group next to each other."""
    return list(dict.fromkeys(cluster.devices[index].node for index in _by_tiers(cluster)))


def _by_tiers(cluster: Cluster) -> list[int]:
    outermost_first = list(reversed(cluster.tiers))
    return sorted(range(cluster.size), key=lambda index: [tier.group_of(index) for tier in outermost_first])


def _devices(cluster: Cluster) -> Table:
    table = Table("device", "kind", title=f"Devices of {cluster.name}")
    profiles = [device.profile for device in cluster.devices]
    has_pcie = any(profile.pcie_bw > 0 for profile in profiles)
    rates = ["GFLOP/s", "memory GB/s", *(["PCIe GB/s"] if has_pcie else [])]
    for column in [*rates, "memory", "memory B/FLOP", "network B/FLOP"]:
        table.add_column(column, justify="right")
    for index in _by_tiers(cluster):
        device, profile, balance = cluster.devices[index], profiles[index], device_balance(cluster, index)
        table.add_row(
            device.name,
            device.kind,
            f"{profile.flops * 1e-9:.1f}",
            f"{profile.mem_bw * 1e-9:.1f}",
            *([f"{profile.pcie_bw * 1e-9:.1f}" if profile.pcie_bw > 0 else ""] if has_pcie else []),
            decimal(int(profile.memory)),
            f"{balance.memory:.2g}",
            f"{balance.network:.2g}",
        )
    return table


def _codecs(cluster: Cluster) -> Table:
    table = Table("device", title="Encoding and decoding at default knobs, GB/s of fp32", box=SIMPLE_HEAD)
    names = sorted({name for device in cluster.devices for name in device.profile.codec_rates})
    for name in names:
        table.add_column(name, justify="right")
    for index in _by_tiers(cluster):
        rates = cluster.devices[index].profile.codec_rates
        cells = (f"{rates[name] * 1e-9:.2g}" if name in rates else "" for name in names)
        table.add_row(cluster.devices[index].name, *cells)
    return table


def _tiers(cluster: Cluster) -> Table:
    table = Table("tier", "devices", title="Tiers, the innermost first")
    table.add_column("way out, Mbit/s", justify="right")
    for tier in cluster.tiers:
        for group, uplink in zip(tier.groups, tier.uplinks, strict=True):
            table.add_row(tier.name, ", ".join(cluster.devices[index].name for index in group), f"{uplink * BITS:.1f}")
        table.add_section()
    return table


def _rates(cluster: Cluster, nodes: list[str]) -> Table:
    table = Table("from \\ to", title="Rate alone/while all exchange, Mbit/s", box=SIMPLE_HEAD, padding=0)
    for node in nodes:
        table.add_column(node, justify="right")
    alone, loaded = _matrices(cluster, nodes)
    for node, row, other in zip(nodes, alone * BITS, loaded * BITS, strict=True):
        cells = ("" if np.isnan(one) else f"{one:.0f}/{two:.0f}" for one, two in zip(row, other, strict=True))
        table.add_row(node, *cells)
    return table


def _matrices(cluster: Cluster, nodes: list[str]) -> tuple[Matrix, Matrix]:
    """Rates alone and while all exchange, from row to column, B/s; NaN where there is no link."""
    place = {node: index for index, node in enumerate(nodes)}
    alone, loaded = (np.full((len(nodes), len(nodes)), np.nan) for _ in range(2))
    for link in cluster.links:
        where = place[link.source], place[link.target]
        alone[where], loaded[where] = link.alone, link.bandwidth
    return alone, loaded


def write_heatmap(cluster: Cluster, path: Path) -> None:
    """A PNG with two panels: the rates between nodes alone, and while all exchange. Raises OSError."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    nodes = nodes_by_tiers(cluster)
    panels = [matrix * BITS for matrix in _matrices(cluster, nodes)]
    known = np.concatenate([panel[~np.isnan(panel)] for panel in panels])
    # A range without an extent has no logarithmic scale; a single device has no link at all.
    least, most = (known.min(), known.max()) if known.size else (1.0, 1.0)
    norm = LogNorm(least / 1.05, most * 1.05)
    side = float(np.clip(INCHES_PER_NODE * len(nodes), *PANEL_INCHES))
    figure = Figure(figsize=(2 * side + 2.4, side + 1.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for panel, title, ax in zip(panels, ("alone", "while all exchange"), axes, strict=True):
        image = ax.imshow(panel, norm=norm, cmap="viridis")
        ax.set(title=title, xlabel="to", ylabel="from")
        ax.set_xticks(range(len(nodes)), nodes, rotation=90)
        ax.set_yticks(range(len(nodes)), nodes)
        if len(nodes) <= READABLE_NODES:
            _write_rates(ax, panel, norm)
        for place in _boundaries(cluster, nodes):
            ax.axhline(place, color="black", linewidth=2)
            ax.axvline(place, color="black", linewidth=2)
    figure.colorbar(image, ax=axes, label="Mbit/s", format="{x:g}").ax.yaxis.set_minor_formatter("{x:g}")
    figure.suptitle(f"Rates between the nodes of {cluster.name}")
    figure.savefig(path, format="png", dpi=120)


def _write_rates(ax: "Axes", panel: Matrix, norm: "LogNorm") -> None:
    for (row, column), rate in np.ndenumerate(panel):
        if not np.isnan(rate):
            shade = "black" if norm(rate) > 0.5 else "white"
            ax.text(column, row, f"{rate:.3g}", ha="center", va="center", fontsize=8, color=shade)


def _boundaries(cluster: Cluster, nodes: list[str]) -> list[float]:
    """Between which places of `nodes` one group of an outer tier ends and another begins."""
    first = {device.node: index for index, device in reversed(list(enumerate(cluster.devices)))}
    return [
        place + 0.5
        for place, (node, other) in enumerate(pairwise(nodes))
        if any(tier.group_of(first[node]) != tier.group_of(first[other]) for tier in cluster.tiers[1:])
    ]
