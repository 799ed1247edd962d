"""The runtime that a command talks to, and what can be refused before one is started."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.knobs import KnobSpace
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.workload import WorkloadProfile
from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.tuner.cli.options import DEFAULT_CLUSTER


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime that is up, or an embedded one that is not started yet."""

    space: KnobSpace
    """Its knobs."""
    workloads: tuple[str, ...]
    """References of its workloads."""
    profile: Callable[[str], WorkloadProfile]
    """Describes one of them."""
    devices: int
    """Size of its cluster."""
    check_changes: Callable[[Sequence[str]], None]
    """Raises InvalidRequest where an embedded one's cluster cannot be changed so; one that is up checks for itself."""
    open: Callable[[], AbstractContextManager[RuntimeAPI]]
    """Connects, or starts the workers; closes, or stops them, on leaving."""

    def strategy(self, workload: str, settings: Sequence[str] = (), *, world_size: int = 0) -> Strategy:
        """The strategy of `KNOB=VALUE` settings for a trial of the workload on so many ranks (0: every device).

        Raises UnknownName, InvalidRequest or IllegalStrategy for what the runtime would refuse.
        """
        if workload not in self.workloads:
            raise UnknownName("workload", workload, self.workloads)
        if world_size > self.devices:
            raise InvalidRequest(f"world size {world_size} is larger than the cluster; use at most {self.devices}")
        return self.space.strategy(self.space.parse(list(settings)), world_size=world_size or self.devices)


def find_runtime(address: str | None, cluster: str | None) -> Target:
    """The runtime at the address, or else an embedded one on the cluster. Raises InvalidRequest or Unreachable."""
    if address is None:
        return _embedded(cluster or DEFAULT_CLUSTER)
    if cluster is not None:
        raise InvalidRequest(f"--cluster {cluster} has no effect with --runtime {address}; leave one of them out")
    from paceline.runtime.client import RuntimeClient

    client = RuntimeClient(address)
    profiles = {profile.name: profile for profile in client.list_workloads()}
    return Target(
        space=client.describe_knobs(),
        workloads=tuple(profiles),
        profile=profiles.__getitem__,
        devices=client.describe_cluster().size,
        check_changes=lambda changes: None,
        open=lambda: client,
    )


def _embedded(cluster: str) -> Target:
    from paceline.runtime import launch, workloads
    from paceline.runtime.embedded import EmbeddedRuntime
    from paceline.runtime.knobs import knob_space
    from paceline.runtime.probe.store import profiles_folder

    launcher = launch.create(cluster)
    return Target(
        space=knob_space(),
        workloads=workloads.references(),
        profile=lambda reference: workloads.create(reference).profile(reference),
        devices=len(launcher.slots),
        check_changes=launcher.check_changes,
        open=lambda: EmbeddedRuntime(cluster, profiles=profiles_folder()),
    )
