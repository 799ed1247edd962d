"""Flows between real processes."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.probe.cluster import _flows_of, probe_links_again
from paceline.runtime.probe.links import FlowRate
from paceline.runtime.probe.rounds import Pair
from paceline.runtime.server.fleet import Worker
from paceline.runtime.worker.flows import _chunk_rate

T = TypeVar("T")


@pytest.fixture(scope="module")
def runtime() -> Iterator[EmbeddedRuntime]:
    """Two workers in the group in which they were measured."""
    with EmbeddedRuntime("local:2") as started:
        yield started


def inside(runtime: EmbeddedRuntime, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on the runtime's event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, runtime._loop).result()


@pytest.fixture
def workers(runtime: EmbeddedRuntime) -> Sequence[Worker]:
    return inside(runtime, runtime._runtime._fleet.complete(range(2)))


def test_devices_of_one_node_are_linked_inside_it(runtime: EmbeddedRuntime) -> None:
    cluster = runtime.describe_cluster()
    (link,) = cluster.links
    assert (link.source, link.target) == ("localhost", "localhost")
    # Loopback moves gigabytes in a second; hardly any machine less than this.
    assert link.bandwidth == link.alone > 1e7
    assert 0 < link.latency < 1
    assert cluster.tiers == ()
    assert runtime.probe_seconds is not None


def test_flows_take_none_of_the_chunks_of_those_before(runtime: EmbeddedRuntime, workers: Sequence[Worker]) -> None:
    both_ways = ((0, 1), (1, 0))

    async def run(homes: Sequence[str]) -> Mapping[Pair, FlowRate]:
        return await _flows_of(workers, homes)(both_ways)

    # Chunks are small between nodes and large inside one, so gloo would refuse those of another run.
    for homes in ("ab", "aa", "ab"):
        rates = inside(runtime, run(homes))
        assert rates.keys() == set(both_ways)
        assert min(rate.bandwidth for rate in rates.values()) > 1e6


def test_links_are_measured_again_where_all_devices_take_part(
    runtime: EmbeddedRuntime, workers: Sequence[Worker]
) -> None:
    cluster = runtime.describe_cluster()
    found = inside(runtime, probe_links_again(cluster, workers))
    assert found.devices == cluster.devices
    assert found.links != cluster.links
    assert inside(runtime, probe_links_again(cluster, workers[:1])) is cluster


def test_rate_counts_neither_the_burst_before_nor_what_comes_after() -> None:
    steady = [index / 100 for index in range(1, 101)]
    burst = [0.0] * 50
    late = [1.0 + index / 1000 for index in range(1, 50)]
    assert _chunk_rate(sorted([*burst, *steady, *late]), 1.0) == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("rate", [7.0, 13.0])
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.7])
def test_rate_of_a_few_chunks_does_not_depend_on_when_they_come(rate: float, phase: float) -> None:
    steady = [(index - phase) / rate for index in range(1, 40)]
    assert _chunk_rate([1e-3, 1e-3, *steady], 1.0) == pytest.approx(rate, rel=1e-6)


def test_rate_of_a_chunk_that_takes_longer_than_all_of_the_time() -> None:
    assert _chunk_rate([4.0, 8.0], 1.0) == pytest.approx(0.25)


def test_rate_of_chunks_in_bunches_is_that_of_the_bunches() -> None:
    # A device with a quota receives once in 20 ms what came meanwhile.
    bunches = [index / 50 for index in range(1, 60) for _ in range(8)]
    assert _chunk_rate(bunches, 1.0) == pytest.approx(400, rel=0.03)
