"""The process group of a generation: built under the generation's store prefix, kept while the members stay."""

import gc
from datetime import timedelta

import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2

BUILD_TIMEOUT = timedelta(seconds=10)
"""How long members wait for each other to appear; one may have died since the plan was made."""
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits. A dead peer is noticed at once by its closed connection, not by this."""

Members = tuple[tuple[int, int], ...]


class Groups:
    """Owns the default process group of the worker process."""

    def __init__(self, device: int, incarnation: int) -> None:
        self._me = (device, incarnation)
        self._members: Members = ()

    def rank_in(self, plan: control_pb2.Plan) -> int:
        """This worker's rank in the plan."""
        return _members(plan).index(self._me)

    def kept_by(self, plan: control_pb2.Plan) -> bool:
        """Whether the present group serves the plan: same members in the same order."""
        return dist.is_initialized() and self._members == _members(plan)

    def enter(self, plan: control_pb2.Plan) -> dist.ProcessGroup:
        """The group of the plan. The caller has let go of the previous one."""
        if not self.kept_by(plan):
            self.leave()
            store = dist.TCPStore(plan.store_host, plan.store_port, is_master=False, timeout=BUILD_TIMEOUT)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"generation-{plan.generation}", store),
                rank=self.rank_in(plan),
                world_size=len(plan.members),
                timeout=BUILD_TIMEOUT,
            )
            dist.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT)
            self._members = _members(plan)
        group = dist.group.WORLD
        assert group is not None
        return group

    def leave(self) -> None:
        """Close all connections to peers, which fails whoever still waits for this rank in a collective."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._members = ()
        # Connections close when the last reference to the group goes, and a failed step leaves cycles behind.
        gc.collect()


def _members(plan: control_pb2.Plan) -> Members:
    return tuple((member.device, member.incarnation) for member in plan.members)
