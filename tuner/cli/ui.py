"""`paceline ui`: what was recorded, in a browser."""

from paceline.tuner.cli.options import Listen, TrackingUri


def ui(*, listen: Listen = "127.0.0.1:5000", tracking_uri: TrackingUri = None) -> None:
    """Serve MLflow's web pages on the tracking store until SIGTERM or Ctrl-C."""
    from paceline.runtime.rpc import parse_address
    from paceline.tuner.tracking.store import default_tracking_uri
    from paceline.tuner.tracking.ui import serve_ui

    host, port = parse_address(listen)
    serve_ui(tracking_uri or default_tracking_uri(), host=host, port=port)
