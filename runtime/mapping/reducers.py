"""Where the reducers of a reduction server run."""

from collections.abc import Sequence

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.domains import parse_integers
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.errors import IllegalStrategy


def reducer_devices(strategy: Strategy, cluster: Cluster, order: Sequence[int]) -> tuple[int, ...]:
    """Resolve `mapping.reducers`: the device of each reducer process, none where ranks reduce for each other.

    `order` is the device of each rank. Raises IllegalStrategy where a device does not exist or runs a rank.
    """
    value = str(strategy["mapping.reducers"])
    if strategy["sync.mode"] != "reduction_server" or value == "beside":
        return ()
    free = tuple(device for device in range(cluster.size) if device not in order)
    if not free:
        raise IllegalStrategy(
            f"mapping.reducers={value} needs devices that no rank runs on, and all {cluster.size} of cluster "
            f"{cluster.name} do; use fewer ranks, or set mapping.reducers=beside"
        )
    if value == "spare":
        return free
    devices = parse_integers(value)
    taken = [device for device in devices if device not in free]
    if taken:
        what = "runs a rank" if taken[0] < cluster.size else f"is not one of cluster {cluster.name}"
        raise IllegalStrategy(
            f"mapping.reducers={value}: device {taken[0]} {what}; free devices are {','.join(map(str, free))}"
        )
    return devices
