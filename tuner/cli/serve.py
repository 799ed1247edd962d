"""`paceline serve`: a policy over gRPC."""

import sys
from typing import Annotated

import typer

from paceline.tuner.cli.options import CHAMPION, Insecure, Listen, PortFile, TrackingUri


def serve(
    *,
    policy: Annotated[
        str, typer.Option("--policy", metavar="URI|DIR", help="models:/NAME@ALIAS, models:/NAME/VERSION or a folder.")
    ] = CHAMPION,
    listen: Listen = "127.0.0.1:7078",
    port_file: PortFile = None,
    insecure: Insecure = False,
    tracking_uri: TrackingUri = None,
) -> None:
    """Serve a policy over gRPC until SIGTERM or Ctrl-C."""
    import asyncio

    from paceline.tuner.cli.stores import open_policy
    from paceline.tuner.policy import service

    served = open_policy(policy, tracking_uri)
    asyncio.run(
        service.serve(
            served,
            listen=listen,
            port_file=port_file,
            allow_insecure=insecure,
            on_ready=lambda address: print(f"policy {served.digest[:12]} listens on {address}", file=sys.stderr),
        )
    )
