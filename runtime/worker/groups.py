"""The process group of a generation: built under the generation's store prefix, kept while the members stay."""

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.exchange.base import PEER_TIMEOUT
from paceline.runtime.membership import destroy_groups

BUILD_TIMEOUT = timedelta(seconds=8)
"""How long members wait for each other to appear; one may have died since the plan was made."""


class Groups:
    """Owns the default process group of the worker process."""

    def __init__(self, device: int, incarnation: int) -> None:
        self._me = (device, incarnation)
        self._connections: set[tuple[int, int]] = set()
        self._severed = False
        self._store: dist.Store | None = None
        self._current: dist.ProcessGroup | None = None
        self._rendezvous: set[tuple[int, int]] = set()
        self._generation = 0

    def rank_in(self, plan: control_pb2.Plan) -> int:
        """This worker's rank in the plan."""
        return [(member.device, member.incarnation) for member in plan.members].index(self._me)

    def enter(self, plan: control_pb2.Plan) -> dist.ProcessGroup:
        """The plan's group of those that train or, at a reducer, of all members. The caller has let go of the previous.

        Whether that one is kept is the server's to say: a rank cannot know whether its peers have left it meanwhile.
        """
        self._generation = plan.generation
        if not plan.keeps_group:
            self._destroy()
            before = _open_sockets()
            server = dist.TCPStore(plan.store_host, plan.store_port, is_master=False, timeout=BUILD_TIMEOUT)
            store = dist.PrefixStore(f"generation-{plan.generation}", server)
            # Until the group stands, a rank waits at the store for its peers to appear.
            self._rendezvous = _open_sockets() - before
            self._wait_on(self._rendezvous)
            # torch numbers the groups of a process and puts the number into the store's keys, so a rank whose last
            # attempt failed would wait for its peers under keys of its own.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank_in(plan),
                world_size=len(plan.members),
                timeout=BUILD_TIMEOUT,
            )
            dist.distributed_c10d._set_pg_timeout(PEER_TIMEOUT)
            self._store = store
            self._wait_on(_open_sockets() - before - self._rendezvous)
            ranks = len(plan.shares) or len(plan.members)
            trains = self.rank_in(plan) < ranks
            self._current = self.subgroup(range(ranks)) if trains and ranks < len(plan.members) else self.all_members
        return self.current()

    @property
    def store(self) -> dist.Store:
        """The store of the generation that made the current group; it outlives every worker."""
        assert self._store is not None, "the server sends a plan first"
        return self._store

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of some ranks of the current one, this rank among them. A collective of those ranks.

        No two of the same ranks may be made in one generation.
        """
        connections, before = self._connections, _open_sockets()
        self._wait_on(connections | self._rendezvous)
        # torch names such a group by its ranks, and one of the same ranks that was made before has left its addresses
        # under that name.
        pg_map = dist.distributed_c10d._world.pg_map
        backend, _ = pg_map[self.all_members]
        pg_map[self.all_members] = (backend, dist.PrefixStore(f"subgroups-{self._generation}", self.store))
        group = dist.new_group(ranks, timeout=BUILD_TIMEOUT, use_local_synchronization=True)
        dist.distributed_c10d._set_pg_timeout(PEER_TIMEOUT, group)
        self._wait_on(connections | (_open_sockets() - before))
        assert isinstance(group, dist.ProcessGroup)
        return group

    def current(self) -> dist.ProcessGroup:
        """The group that was entered last."""
        assert self._current is not None, "the server sends a plan first"
        return self._current

    @property
    def all_members(self) -> dist.ProcessGroup:
        """The group of the same generation with the reducers behind those that train."""
        group = dist.group.WORLD
        assert group is not None, "the server sends a plan first"
        return group

    def _wait_on(self, connections: set[tuple[int, int]]) -> None:
        self._connections = connections
        # Whichever comes second, this or `sever`, sees what the other has done.
        if self._severed:
            raise ConnectionAbortedError("the generation was given up while its group was made")

    def sever(self) -> None:
        """Shut down the connections to all peers, from any thread: every collective in flight fails at once, on both
        ends.

        A dead peer fails only the ranks that exchange with it directly. The others wait for those, and gloo neither
        interrupts a waiting collective nor closes a connection before it is through. A rank that is making its group
        fails too, then or as soon as it waits for its peers, until `leave`.
        """
        self._severed = True
        for descriptor, inode in self._connections:
            # The descriptor may have been closed, and its number given to something else.
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        # Gloo takes the end of its listening socket for a fatal error.
                        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Destroy the group, and be ready for another."""
        self._destroy()
        self._severed = False

    def _destroy(self) -> None:
        self._connections = set()
        self._current = None
        destroy_groups(list(dist.distributed_c10d._world.pg_map))


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each open socket."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
