"""What codecs cost on one core, beside a copy of memory, and what they save.

    python -m experiments.codecs.run

A bucket of normally distributed fp32 numbers, one square matrix, is encoded and decoded by every codec in turn, round
after round, so that whatever else the machine does hits all of them. Rates are bytes of fp32 per second of the core's
own time, in which others do not run. A joint codec is one rank whose messages are answered with themselves, so its time
is that of both directions.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.resumable import Results, spread, table
from paceline.runtime.compress.base import CODECS, BlockCodec, Codec, JointCodec

HERE = Path(__file__).parent
SIZES_MB = (1, 4, 25)
"""Bucket sizes, MiB of fp32; 25 is the default of `sync.bucket_mb`."""
ROUNDS = 9
REPEATED_MB = 32
"""MiB that each way works through in a round."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "fp8 e4m3": ("fp8", {}),
    "fp8 e5m2": ("fp8", {"format": "e5m2"}),
    "sign": ("sign", {}),
    "topk 0.05": ("topk", {"ratio": 0.05}),
    "topk 0.01": ("topk", {"ratio": 0.01}),
    "randomk 0.05": ("randomk", {"ratio": 0.05}),
    "randomk 0.01": ("randomk", {"ratio": 0.01}),
    "powersgd 1": ("powersgd", {"rank": 1}),
    "powersgd 4": ("powersgd", {"rank": 4}),
}
TARGETS = {"fp16": 1.0, "bf16": 1.0, "int8": 1.0, "topk 0.05": 0.3, "topk 0.01": 0.3}
"""Rate of encoding that is asked for, GB/s."""


def codec_of(way: str) -> Codec:
    """The codec in the settings of a row."""
    name, settings = WAYS[way]
    plugin = CODECS.get(name)
    return plugin(plugin.Config(**settings))


def side_of(size_mb: int) -> int:
    """Rows and columns of a bucket."""
    side = math.isqrt(size_mb * 2**18)
    assert side**2 == size_mb * 2**18, "choose sizes that are squares"
    return side


def _rate(size_mb: int, work: Callable[[], object]) -> float:
    repeats = max(1, REPEATED_MB // size_mb)
    began = time.thread_time()
    for _ in range(repeats):
        work()
    return repeats * size_mb * 2**20 / 1e9 / (time.thread_time() - began)


def _converse(codec: JointCodec, bucket: torch.Tensor, side: int) -> None:
    codec.begin_step()
    codec.note_exchange()
    conversation = codec.converse(bucket, (("weight", torch.Size([side, side])),), 1)
    try:
        message = next(conversation)
        while True:
            message = conversation.send(message)
    except StopIteration:
        codec.commit_step()


def measure_copy(size_mb: int) -> dict[str, float]:
    """GB/s of a copy."""
    bucket = torch.randn(size_mb * 2**18)
    out = torch.empty_like(bucket)
    out.copy_(bucket)
    return {"both": _rate(size_mb, lambda: out.copy_(bucket))}


def measure(way: str, size_mb: int) -> dict[str, float]:
    """GB/s of fp32, by direction."""
    codec, bucket = codec_of(way), torch.randn(size_mb * 2**18)
    if isinstance(codec, JointCodec):
        side = side_of(size_mb)
        _converse(codec, bucket, side)
        return {"both": _rate(size_mb, lambda: _converse(codec, bucket, side))}
    assert isinstance(codec, BlockCodec)
    out, payload = torch.zeros_like(bucket), codec.encode(bucket)
    codec.decode(payload, out)
    return {
        "encode": _rate(size_mb, lambda: codec.encode(bucket)),
        "decode": _rate(size_mb, lambda: codec.decode(payload, out)),
        "both": _rate(size_mb, lambda: codec.decode(codec.encode(bucket), out)),
    }


def main() -> None:
    """Measure what is missing and write the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = Results(HERE)
    for size in SIZES_MB:
        for turn in range(ROUNDS):
            results.get(f"{size} MiB, copy, {turn}", lambda size=size: measure_copy(size))
            for way in WAYS:
                results.get(f"{size} MiB, {way}, {turn}", lambda size=size, way=way: measure(way, size))
        print(f"{size} MiB: done", file=sys.stderr, flush=True)

    def rates(size: int, way: str, direction: str) -> list[float]:
        rounds = [results.entries[f"{size} MiB, {way}, {turn}"] for turn in range(ROUNDS)]
        return [each[direction] for each in rounds if direction in each]

    rows = []
    for size in SIZES_MB:
        rows.append([f"{size} MiB", "copy", "", "", "", spread(rates(size, "copy", "both")), ""])
        for way in WAYS:
            fewer = size * 2**20 / codec_of(way).bucket_bytes([torch.Size([side_of(size)] * 2)])
            encode, decode, both = (rates(size, way, direction) for direction in ("encode", "decode", "both"))
            target = TARGETS.get(way)
            met = "" if target is None else f"{target} {'met' if sorted(encode)[ROUNDS // 2] >= target else 'MISSED'}"
            rows.append(
                [
                    f"{size} MiB",
                    way,
                    f"{fewer:.3g}",
                    spread(encode) if encode else "",
                    spread(decode) if decode else "",
                    spread(both),
                    met,
                ]
            )
    text = f"GB/s of fp32 per second of one core: median [smallest, largest] of {ROUNDS} alternating rounds.\n"
    text += f"`none` encodes without a copy. torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}.\n\n"
    header = ["bucket", "codec", "times fewer bytes", "encode", "decode", "both", "encode, asked for"]
    text += table(header, rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
