"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_CLUSTER = "local:4"
POLICY_NAME = "paceline-policy"
CHAMPION = f"models:/{POLICY_NAME}@champion"

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="What to train, e.g. bytes-lm/tiny.", show_default=False)
]
RuntimeAddress = Annotated[
    str | None,
    typer.Option("--runtime", metavar="HOST:PORT", help="A running runtime, instead of an embedded one."),
]
EmbeddedCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="local:N|lab:NAME", help=f"Cluster of the embedded runtime, {DEFAULT_CLUSTER} if left out."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        metavar="sqlite:///FILE",
        help="MLflow store, paceline.db in $PACELINE_HOME or ~/.local/share/paceline if left out.",
    ),
]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Record nothing in MLflow.")]
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")]
PortFile = Annotated[
    Path | None, typer.Option("--port-file", metavar="FILE", help="Write the port here once calls are answered.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow an address beyond this machine, although nothing is encrypted.")
]
