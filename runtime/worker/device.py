"""A quick measurement of this device, all devices busy at once."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch
import torch.distributed as dist

from paceline.runtime.domain.cluster import DeviceProfile


def _seconds_per_call(call: Callable[[], object], seconds: float) -> float:
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
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


def measure_device(group: dist.ProcessGroup, seconds: float) -> DeviceProfile:
    """Profile this device in `seconds` per figure. A collective."""
    size = 384
    left, right = torch.randn(size, size), torch.randn(size, size)
    dist.barrier(group)
    flops = 2 * size**3 / _seconds_per_call(lambda: left @ right, seconds)
    source, target = torch.empty(2**23), torch.empty(2**23)
    dist.barrier(group)
    mem_bw = 2 * source.numel() * 4 / _seconds_per_call(lambda: target.copy_(source), seconds)
    one = torch.zeros(1)
    latency = _median_seconds(lambda: dist.all_reduce(one, group=group), 20)
    return DeviceProfile(
        flops=flops,
        mem_bw=mem_bw,
        net_latency=latency,
        pcie_bw=0.0,
        memory=psutil.virtual_memory().total / group.size(),
    )
