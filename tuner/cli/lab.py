"""`paceline lab`: clusters that are built on this machine from a file."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.tuner.cli.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.runtime.lab.check import DeviceCheck, LinkCheck

DEVIATES = 1
NAME_WIDTH = 20

lab = typer.Typer(name="lab", help="Build clusters on this machine from a file: real links, speeds and failures.")

Cluster = Annotated[
    str, typer.Argument(metavar="FILE|EXAMPLE", help="A cluster file, or the name of an example.", show_default=False)
]


@lab.command("list")
def list_() -> None:
    """List the examples."""
    from paceline.runtime.lab import file

    for name, summary in file.examples().items():
        print(f"{name:<{NAME_WIDTH}} {summary}")


@lab.command()
def show(cluster: Cluster) -> None:
    """Print a cluster file, to start one of your own from."""
    from paceline.runtime.lab import file

    print(file.find(cluster).read_text(), end="")


@lab.command()
def check(cluster: Cluster, *, json_output: Json = False) -> int:
    """Build a lab, measure every link and device, and remove it.

    Exits with 1 when one of them is off by more than 10 % from what the file asks for.
    """
    from rich.console import Console

    from paceline.runtime.lab import file
    from paceline.runtime.lab.check import TOLERANCE, check_lab, deviation

    parsed = file.load(cluster)
    with Console(stderr=True).status(f"measuring lab {parsed.name}"):
        links, devices = check_lab(parsed)
    if json_output:
        print(json.dumps(_as_json(links, devices)))
    else:
        for table in _as_tables(links, devices):
            Console().print(table)
    checks: list[LinkCheck | DeviceCheck] = [*links, *devices]
    return DEVIATES if any(abs(deviation(each)) > TOLERANCE for each in checks) else 0


def _as_json(links: "list[LinkCheck]", devices: "list[DeviceCheck]") -> dict[str, Any]:
    return {
        "links": [
            {"from": link.source, "to": link.target, "configured": link.configured, "measured": link.measured}
            for link in links
        ],
        "devices": [
            {
                "node": device.node,
                "device": device.device,
                "configured": device.configured,
                "measured": device.measured,
            }
            for device in devices
        ],
    }


def _as_tables(links: "list[LinkCheck]", devices: "list[DeviceCheck]") -> "tuple[Table, Table]":
    from rich.table import Table

    from paceline.runtime.lab.check import TOLERANCE, deviation

    def off(check: "LinkCheck | DeviceCheck") -> str:
        share = deviation(check)
        return f"[red]{share:+.1%}[/]" if abs(share) > TOLERANCE else f"{share:+.1%}"

    by_link = Table("from", "to", title="Links, Mbit/s")
    by_device = Table("device", title="Devices, CPU cores")
    for table in (by_link, by_device):
        for column in ("configured", "measured", "off"):
            table.add_column(column, justify="right")
    for link in links:
        configured, measured = (f"{rate * 8e-6:.1f}" for rate in (link.configured, link.measured))
        by_link.add_row(link.source, link.target, configured, measured, off(link))
    for device in devices:
        by_device.add_row(device.device, f"{device.configured:g}", f"{device.measured:.3f}", off(device))
    return by_link, by_device


@lab.command("set")
def set_(
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET.SETTING=VALUE...", help="For example west.uplink='50 Mbit/s'.", show_default=False
        ),
    ],
    *,
    runtime: Annotated[
        str, typer.Option("--runtime", metavar="HOST:PORT", help="The runtime whose lab is meant.", show_default=False)
    ],
) -> None:
    """Change a lab while it runs.

    Nodes have link, speed, state (killed, frozen, running) and network (cut, up). Racks have uplink and network.
    Devices have speed. A rate can be given for one direction: west.uplink.up.
    """
    from paceline.runtime.client import RuntimeClient

    with RuntimeClient(runtime) as client:
        client.change_cluster(changes)
