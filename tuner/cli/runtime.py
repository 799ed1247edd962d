"""`paceline runtime`: execute trials for clients until it is told to stop."""

import os
import sys
from typing import Annotated

import typer

from paceline.tuner.cli.options import DEFAULT_CLUSTER, Insecure, Listen, PortFile


def runtime(
    *,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="local:N|lab:NAME", help="Where workers run.")
    ] = DEFAULT_CLUSTER,
    listen: Listen = "127.0.0.1:7077",
    port_file: PortFile = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="fsspec URL of the snapshots; a temporary folder if left out."),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workload", metavar="MODULE:CLASS", help="Register a workload; may be repeated."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Serve a runtime over gRPC until SIGTERM or Ctrl-C."""
    import asyncio

    if workloads:
        # An installed script, unlike `python -m`, does not look for modules in the current directory.
        sys.path.insert(0, os.getcwd())
    from paceline.runtime.probe.store import profiles_folder
    from paceline.runtime.server.service import serve

    asyncio.run(
        serve(
            cluster,
            listen=listen,
            port_file=port_file,
            store_url=store,
            workload_classes=tuple(workloads or ()),
            profiles=profiles_folder(),
            allow_insecure=insecure,
            on_ready=lambda address: print(f"runtime {cluster} listens on {address}", file=sys.stderr),
        )
    )
