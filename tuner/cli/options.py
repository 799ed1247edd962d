"""Options and arguments that several commands share, and the runtime they name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from paceline.runtime.api import RuntimeAPI

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="What to train, e.g. bytes-lm/tiny.", show_default=False)
]
RuntimeAddress = Annotated[
    str | None,
    typer.Option("--runtime", metavar="HOST:PORT", help="A runtime that is up; default: an embedded one."),
]
EmbeddedCluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="local:N", help="Cluster of the embedded runtime; default: local:4."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of initial weights and sample order.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri", metavar="URI", help="MLflow tracking store; default: sqlite:///paceline.db."
    ),
]
