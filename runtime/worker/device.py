"""A quick measurement of this device and of its exchange with the others, all devices busy at once."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from paceline.runtime.domain.cluster import DeviceProfile
from paceline.runtime.exchange import all_reduce_bytes

SECONDS_EACH = 0.15
EXCHANGE_ELEMENTS = 2**20


def _seconds_per_call(call: Callable[[], object]) -> float:
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS_EACH:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


def _median_seconds(call: Callable[[], object], calls: int) -> float:
    call()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_device(group: dist.ProcessGroup) -> tuple[DeviceProfile, float]:
    """Profile this device; also the B/s this rank sends in an all-reduce of 4 MiB. A collective."""
    size = 384
    left, right = torch.randn(size, size), torch.randn(size, size)
    dist.barrier(group)
    flops = 2 * size**3 / _seconds_per_call(lambda: left @ right)
    source, target = torch.empty(2**23), torch.empty(2**23)
    dist.barrier(group)
    mem_bw = 2 * source.numel() * 4 / _seconds_per_call(lambda: target.copy_(source))
    one, large = torch.zeros(1), torch.zeros(EXCHANGE_ELEMENTS)
    latency = _median_seconds(lambda: dist.all_reduce(one, group=group), 20)
    seconds = _median_seconds(lambda: dist.all_reduce(large, group=group), 7)
    world_size = group.size()
    # A world of one exchanges nothing; its memory is the only path there is.
    sent = all_reduce_bytes(EXCHANGE_ELEMENTS * 4, world_size, 0) or EXCHANGE_ELEMENTS * 4
    profile = DeviceProfile(
        flops=flops,
        mem_bw=mem_bw,
        net_latency=latency,
        pcie_bw=0.0,
        memory=psutil.virtual_memory().total / world_size,
    )
    return profile, sent / seconds
