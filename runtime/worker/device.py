"""A quick measurement of this device, all devices busy at once."""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import CODECS, BlockCodec, Codec, JointCodec
from paceline.runtime.domain.cluster import DeviceProfile

CODEC_SECONDS = 0.03
"""Time per codec: short, as there are many, and of its own CPU time little is enough."""
SIDE = 512
"""Rows and columns of the matrix that is encoded: 1 MiB of fp32."""


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


def measure_codecs(share: float, seconds: float = CODEC_SECONDS) -> dict[str, float]:
    """Rate at which each codec that changes anything encodes and decodes, B/s of fp32, by name.

    `share` is the CPU time that this process gets per second. What is measured is CPU time: a quota comes in slices
    that are as long as a measurement.
    """
    bucket, total = torch.randn(SIDE**2), torch.zeros(SIDE**2)
    rates = {}
    for name in CODECS.names():
        plugin = CODECS.get(name)
        if plugin.lossy:
            call = partial(_encode_and_decode, plugin(plugin.Config()), bucket, total)
            rates[name] = 4 * bucket.numel() * share / _cpu_seconds(call, seconds)
    return rates


def _cpu_seconds(call: Callable[[], object], seconds: float) -> float:
    """CPU time of a call, median over so many seconds by the clock: the first calls get fresh memory."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def _encode_and_decode(codec: Codec, bucket: Tensor, total: Tensor) -> None:
    if isinstance(codec, BlockCodec):
        codec.decode(codec.encode(bucket), total)
        return
    assert isinstance(codec, JointCodec)
    # Alone, what is to be summed over all ranks is the sum.
    conversation = codec.converse(bucket, (("weight", torch.Size([SIDE, SIDE])),), 1)
    message = next(conversation)
    with suppress(StopIteration):
        while True:
            message = conversation.send(message)


def measure_device(group: dist.ProcessGroup, seconds: float) -> DeviceProfile:
    """Profile this device in `seconds` per figure. A collective."""
    size = 384
    left, right = torch.randn(size, size), torch.randn(size, size)
    dist.barrier(group)
    began, cpu_began = time.perf_counter(), time.process_time()
    flops = 2 * size**3 / _seconds_per_call(lambda: left @ right, seconds)
    share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    source, target = torch.empty(2**23), torch.empty(2**23)
    dist.barrier(group)
    mem_bw = 2 * source.numel() * 4 / _seconds_per_call(lambda: target.copy_(source), seconds)
    dist.barrier(group)
    codec_rates = measure_codecs(share)
    one = torch.zeros(1)
    latency = _median_seconds(lambda: dist.all_reduce(one, group=group), 20)
    return DeviceProfile(
        flops=flops,
        mem_bw=mem_bw,
        net_latency=latency,
        pcie_bw=0.0,
        memory=psutil.virtual_memory().total / group.size(),
        codec_rates=codec_rates,
    )
