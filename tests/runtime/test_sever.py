"""A rank gets out of a collective although its peer lives and says nothing: real processes over gloo."""

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.worker import groups as groups_module
from paceline.runtime.worker.groups import Groups

SOON_SECONDS = groups_module.BUILD_TIMEOUT.total_seconds() / 2
"""What is severed must not take as long as the timeout that would free it in the end."""


def serve_rank(device: int, orders: Connection, severing: Connection) -> None:
    """A worker without a server: does what the test orders, and says what came of it."""
    groups = Groups(device, 0)

    def sever() -> None:
        while severing.recv():
            groups.sever()

    threading.Thread(target=sever, daemon=True).start()
    orders.send("ready")
    while (order := orders.recv()) != "end":
        try:
            if order == "leave":
                groups.leave()
                orders.send("left")
            elif order == "all-reduce":
                tensor = torch.tensor([1.0])
                work = dist.all_reduce(tensor, async_op=True)
                orders.send("in it")
                work.wait()
                orders.send(float(tensor))
            else:
                orders.send("entering")
                groups.enter(control_pb2.Plan.FromString(order))
                orders.send("entered")
        except (RuntimeError, OSError) as error:
            orders.send(f"failed: {error}")


class Rank:
    """The test's end of such a process."""

    def __init__(self, device: int) -> None:
        context = multiprocessing.get_context("spawn")
        (self._orders, orders), (self._severing, severing) = context.Pipe(), context.Pipe()
        self._process = context.Process(target=serve_rank, args=(device, orders, severing), daemon=True)
        self._process.start()

    def order(self, what: object) -> None:
        self._orders.send(what)

    def sever(self) -> None:
        self._severing.send(True)

    def said(self, seconds: float = 60.0) -> object:
        assert self._orders.poll(seconds), "the rank still waits"
        return self._orders.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[Rank, Rank]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        pair = Rank(0), Rank(1)
    for rank in pair:
        assert rank.said() == "ready"
    yield pair
    for rank in pair:
        rank.close()


def plan(store: dist.TCPStore, generation: int) -> bytes:
    members = [control_pb2.Member(device=device) for device in (0, 1)]
    return control_pb2.Plan(
        generation=generation, members=members, store_host="127.0.0.1", store_port=store.port
    ).SerializeToString()


def enter(ranks: tuple[Rank, Rank], store: dist.TCPStore, generation: int) -> None:
    for rank in ranks:
        rank.order(plan(store, generation))
    for rank in ranks:
        assert (rank.said(), rank.said()) == ("entering", "entered")


def leave(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.order("leave")
        assert rank.said() == "left"


def all_reduce(ranks: tuple[Rank, Rank]) -> list[object]:
    for rank in ranks:
        rank.order("all-reduce")
        assert rank.said() == "in it"
    return [rank.said() for rank in ranks]


def test_rank_in_a_collective_with_a_silent_peer_is_freed(ranks: tuple[Rank, Rank], store: dist.TCPStore) -> None:
    stuck, silent = ranks
    enter(ranks, store, 1)
    stuck.order("all-reduce")
    assert stuck.said() == "in it"
    stuck.sever()
    assert str(stuck.said(SOON_SECONDS)).startswith("failed")
    silent.order("all-reduce")
    assert silent.said() == "in it"
    assert str(silent.said(SOON_SECONDS)).startswith("failed")
    leave(ranks)
    enter(ranks, store, 2)
    assert all_reduce(ranks) == [2.0, 2.0]
    leave(ranks)


def test_rank_whose_peer_does_not_come_to_make_the_group_is_freed(
    ranks: tuple[Rank, Rank], store: dist.TCPStore
) -> None:
    stuck, _ = ranks
    stuck.order(plan(store, 3))
    assert stuck.said() == "entering"
    stuck.sever()
    assert str(stuck.said(SOON_SECONDS)).startswith("failed")
    leave(ranks)
    enter(ranks, store, 4)
    assert all_reduce(ranks) == [2.0, 2.0]
    leave(ranks)
