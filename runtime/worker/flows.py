"""Bytes between two ranks as fast as they go: what a probe of the links runs."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

from paceline.proto.paceline.v1 import control_pb2

IN_FLIGHT = 4
"""Chunks that the receiver expects at once. Gloo sends only what is expected, so no more than these are under way."""
PINGS = 8
WARM_UP = 0.3
"""Part of the time that is not counted: a token bucket is full when a flow begins."""
FIRST_TAG = 1024
TAGS_PER_FLOW = 4

Flow = tuple[int, int]
"""Rank that sends, rank that receives."""


def run_flows(
    group: dist.ProcessGroup, flows: Sequence[Flow], seconds: float, chunk_bytes: int
) -> list[control_pb2.WorkerMessage.FlowMeasured]:
    """Run all flows at once; figures of those that end at this rank. Every rank of the group calls it alike.

    Raises RuntimeError when a peer is lost.
    """
    mine = [
        (source, target, FIRST_TAG + index * TAGS_PER_FLOW)
        for index, (source, target) in enumerate(flows)
        if group.rank() in (source, target)
    ]
    latencies: dict[Flow, float] = {}
    bandwidths: dict[Flow, float] = {}

    def ping(source: int, target: int, tag: int) -> None:
        if group.rank() == source:
            _answer(group, target, tag)
        else:
            latencies[source, target] = _latency(group, source, tag)

    def send(source: int, target: int, tag: int) -> None:
        if group.rank() == source:
            _send(group, target, tag, seconds, chunk_bytes)
        else:
            bandwidths[source, target] = _receive(group, source, tag, seconds, chunk_bytes)

    _at_once(ping, mine)
    # Only what flows at the same time contends.
    dist.barrier(group)
    _at_once(send, mine)
    return [
        control_pb2.WorkerMessage.FlowMeasured(source=flow[0], bandwidth=bandwidth, latency=latencies[flow])
        for flow, bandwidth in bandwidths.items()
    ]


def _at_once(act: Callable[[int, int, int], None], flows: Sequence[tuple[int, int, int]]) -> None:
    """Run `act` for each flow in a thread of its own. Raises what one of them raises."""
    with ThreadPoolExecutor(max(1, len(flows))) as pool:
        for done in [pool.submit(act, *flow) for flow in flows]:
            done.result()


def _answer(group: dist.ProcessGroup, target: int, tag: int) -> None:
    ping = torch.zeros(1, dtype=torch.uint8)
    for _ in range(PINGS):
        group.recv([ping], target, tag).wait()
        group.send([ping], target, tag + 1).wait()


def _latency(group: dist.ProcessGroup, source: int, tag: int) -> float:
    """Half of a round trip, s."""
    ping = torch.zeros(1, dtype=torch.uint8)
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        group.send([ping], source, tag).wait()
        group.recv([ping], source, tag + 1).wait()
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _send(group: dist.ProcessGroup, target: int, tag: int, seconds: float, chunk_bytes: int) -> None:
    chunks = [torch.zeros(chunk_bytes, dtype=torch.uint8) for _ in range(IN_FLIGHT)]
    under_way: list[dist.Work] = []
    began = time.perf_counter()
    rest = IN_FLIGHT
    for index in count():
        chunk = chunks[index % IN_FLIGHT]
        if len(under_way) == IN_FLIGHT:
            under_way.pop(0).wait()
        # When the receiver reads that time is up, it expects as many more as it always does.
        is_over = time.perf_counter() - began >= seconds
        chunk[0] = is_over
        under_way.append(group.send([chunk], target, tag + 2))
        rest -= is_over
        if rest == 0:
            break
    for work in under_way:
        work.wait()


def _receive(group: dist.ProcessGroup, source: int, tag: int, seconds: float, chunk_bytes: int) -> float:
    """B/s."""
    began = time.perf_counter()
    expected = []
    for _ in range(IN_FLIGHT):
        chunk = torch.empty(chunk_bytes, dtype=torch.uint8)
        expected.append((chunk, group.recv([chunk], source, tag + 2)))
    arrivals = []
    is_over = False
    while expected:
        chunk, work = expected.pop(0)
        work.wait()
        arrivals.append(time.perf_counter() - began)
        is_over = is_over or bool(chunk[0])
        if not is_over:
            expected.append((chunk, group.recv([chunk], source, tag + 2)))
    return _chunk_rate(arrivals, seconds) * chunk_bytes


def _chunk_rate(arrivals: Sequence[float], seconds: float) -> float:
    """Chunks/s from the end of the warm-up until time is up: later on, flows that end leave their share to others.

    Between two arrivals the next chunk counts in part, as on a slow link only a few arrive in all of the time.
    """
    arrived = np.interp([WARM_UP * seconds, seconds], [0.0, *arrivals], range(len(arrivals) + 1))
    return float(arrived[1] - arrived[0]) / ((1 - WARM_UP) * seconds)
