"""`paceline demo`: everything once, on this machine."""

from paceline.tuner.cli.options import TrackingUri


def demo(*, tracking_uri: TrackingUri = None) -> int:
    """Train a policy, serve it, and let it tune a job on this machine. Takes a few minutes."""
    from rich.console import Console

    from paceline.tuner.cli.stores import open_tracking
    from paceline.tuner.cli.tune import status_of
    from paceline.tuner.demo import DemoConfig, choose_cluster, demo

    console = Console()
    cluster, why = choose_cluster()
    console.print(f"cluster {cluster}: {why}", soft_wrap=True)
    session = demo(DemoConfig(cluster=cluster), open_tracking(tracking_uri), console)
    see = f"paceline ui --tracking-uri {tracking_uri}" if tracking_uri else "paceline ui"
    console.print(f"Every run is recorded: {see}, then open http://127.0.0.1:5000", soft_wrap=True)
    return status_of(session)
