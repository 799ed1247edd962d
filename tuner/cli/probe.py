"""`paceline probe`: what a cluster can do."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.runtime.errors import IllegalStrategy, InvalidRequest
from paceline.tuner.cli.options import DEFAULT_CLUSTER, EmbeddedCluster, Json, RuntimeAddress

if TYPE_CHECKING:
    from paceline.runtime.domain.cluster import Cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probed:
    """A cluster profile and where it comes from."""

    cluster: "Cluster"
    """The profile."""
    fingerprint: str | None = None
    """What it is kept under; None where a runtime was asked."""
    seconds: float | None = None
    """How long measuring took; None where nothing was measured."""
    path: Path | None = None
    """Where it is kept."""


def probe(
    *,
    cluster: EmbeddedCluster = None,
    runtime: RuntimeAddress = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="WORKLOAD", help="Say what limits this one.")
    ] = "bytes-lm/small",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure even if a kept profile still holds.")] = False,
    heatmap: Annotated[
        Path | None,
        typer.Option("--heatmap", metavar="FILE.png", help="Where to draw the rates; beside the profile if left out."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure devices and links of a cluster and find its tiers, or show what a runtime knows of its cluster."""
    from rich.console import Console

    from paceline.runtime.probe.balance import cluster_balance
    from paceline.runtime.probe.store import to_json
    from paceline.tuner.cli.target import find_runtime
    from paceline.tuner.limits import find_limits
    from paceline.tuner.probe_report import as_tables

    if fresh and runtime is not None:
        raise InvalidRequest(f"--fresh has no effect with --runtime {runtime}; leave one of them out")
    if heatmap is not None and (heatmap.is_dir() or not heatmap.parent.is_dir()):
        raise InvalidRequest(f"heat map {heatmap} must be a file in a folder that exists")
    target = find_runtime(runtime, cluster)
    target.strategy(workload)
    if runtime is None:
        probed = _probe(cluster or DEFAULT_CLUSTER, fresh=fresh)
    else:
        with target.open() as opened:
            probed = Probed(cluster=opened.describe_cluster())
    profile = probed.cluster
    balance = cluster_balance(profile)
    try:
        limits, sentence = find_limits(target.profile(workload), profile, target.space.default), ""
    except IllegalStrategy as error:
        limits, sentence = None, f"{workload} cannot run here under the default strategy: {error}"
    picture = _draw(profile, heatmap or (probed.path and probed.path.with_suffix(".png")))
    if json_output:
        answer: dict[str, Any] = {
            **json.loads(to_json(profile)),
            "fingerprint": probed.fingerprint,
            "seconds": probed.seconds,
            "balance": dataclasses.asdict(balance),
            "limits": dataclasses.asdict(limits) if limits else None,
            "heatmap": picture and str(picture),
        }
        print(json.dumps(answer, allow_nan=False))
        return
    for table in as_tables(profile):
        Console().print(table)
    print(f"Balance: {balance.memory:.2g} B of memory and {balance.network:.2g} B of network per FLOP.")
    if limits:
        print(f"{limits.sentence} It asks for {limits.network_per_flop:.2g} B of network per FLOP.")
    else:
        print(sentence)
    if probed.path:
        how = "kept from an earlier probe" if probed.seconds is None else f"measured in {probed.seconds:.1f} s"
        print(f"Profile ({how}): {probed.path}")
    if picture:
        print(f"Heat map: {picture}")


def _probe(reference: str, *, fresh: bool) -> Probed:
    """The kept profile, without starting anything, or else a new one."""
    from rich.console import Console

    from paceline.runtime import launch
    from paceline.runtime.embedded import EmbeddedRuntime
    from paceline.runtime.probe.store import ProfileStore, fingerprint, profiles_folder

    launcher = launch.create(reference)
    profiles = ProfileStore(profiles_folder())
    probed = Probed(cluster=kept) if not fresh and (kept := profiles.load(launcher)) else None
    if probed is None:
        with (
            Console(stderr=True).status(f"measuring {reference}"),
            EmbeddedRuntime(reference, profiles=profiles.folder, fresh_probe=True) as runtime,
        ):
            probed = Probed(cluster=runtime.describe_cluster(), seconds=runtime.probe_seconds)
    return dataclasses.replace(probed, fingerprint=fingerprint(launcher), path=profiles.path(launcher))


def _draw(profile: "Cluster", path: Path | None) -> Path | None:
    from paceline.tuner.probe_report import write_heatmap

    if path is None:
        return None
    try:
        write_heatmap(profile, path)
    except OSError as error:
        raise InvalidRequest(f"heat map {path} cannot be written: {error.strerror}") from None
    return path
