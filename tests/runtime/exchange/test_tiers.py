"""The pipeline between real processes."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.runtime.compress import CODECS
from paceline.runtime.compress.base import BlockCodec
from paceline.runtime.compress.topk import TopK, TopKConfig
from paceline.runtime.exchange import BucketAverager, Tiers, make_plan
from paceline.runtime.mapping.levels import Level

CHUNK_ELEMENTS = 64
SIZES = (1, 5, 63, 64, 1000)
STEPS = 4
LOSSY = {"rtol": 0.05, "atol": 0.02}
TREES: dict[str, tuple[Sequence[Level], int]] = {
    "flat": ((), 3),
    "two racks": ((Level(name="rack", groups=(1, 2, 1, 2)),), 4),
    "unequal racks": ((Level(name="rack", groups=(1, 2, 2, 2, 1)),), 5),
    "three tiers": ((Level(name="node", groups=(0, 0, 1, 1, 2, 3)), Level(name="rack", groups=(0, 0, 0, 0, 1, 1))), 6),
}

# Every group of c children sends each element c - 1 times inwards and c - 1 times back.
TIMES_SENT: dict[str, dict[str, int]] = {
    "flat": {"cluster": 4},
    "two racks": {"rack": 4, "cluster": 2},
    "unequal racks": {"rack": 6, "cluster": 2},
    "three tiers": {"node": 4, "rack": 4, "cluster": 2},
}


def _codec(name: str) -> BlockCodec:
    codec = TopK(TopKConfig(ratio=0.3)) if name == "topk" else CODECS.get(name)(CODECS.get(name).Config())
    assert isinstance(codec, BlockCodec)
    return codec


def _exchange(codec_name: str, levels: Sequence[Level], *, slow_only: bool = False) -> Tiers:
    group = dist.group.WORLD
    assert group is not None
    plan = make_plan(levels, group.rank(), group.size())
    return Tiers(_codec(codec_name), group, levels, plan, chunk_bytes=4 * CHUNK_ELEMENTS, slow_only=slow_only)


def _bucket(rank: int, size: int, step: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + 10 * size + rank))


BLOCK_CODECS = [name for name in CODECS.names() if issubclass(CODECS.get(name), BlockCodec)]


def _coded(tree: str) -> list[tuple[str, bool]]:
    """Codecs, and whether they apply to the slow tier alone: all on one tree, one of each kind on the others."""
    codecs = BLOCK_CODECS if tree == "two racks" else ["none", "fp16", "topk"]
    return [(codec, slow_only) for codec in codecs for slow_only in (False, True)]


def _average(rank: int, tree: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    levels, world_size = TREES[tree]
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )
    for codec, slow_only in _coded(tree):
        averager = BucketAverager(_exchange(codec, levels, slow_only=slow_only))
        means = []
        for step in range(STEPS):
            averager.begin_step(measure_norms=False)
            # All buckets of a step are under way at once.
            futures = [averager.start(_bucket(rank, size, step), ((f"p{size}", torch.Size([size])),)) for size in SIZES]
            means.append([future.wait() for future in futures])
            averager.commit_step()
        outcome = {"means": means, "residuals": averager.residuals(), "bytes": averager.meter.wire_bytes}
        torch.save(outcome, f"{folder}/{codec}-{slow_only}-{rank}")
        averager.release()
    dist.destroy_process_group()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.slow
def test_ranks_agree_and_nothing_is_lost(tree: str, tmp_path: Path) -> None:
    _, world_size = TREES[tree]
    # Starting processes takes seconds, so they do everything at once.
    mp.spawn(_average, (tree, str(tmp_path)), nprocs=world_size)
    for codec, slow_only in _coded(tree):
        ranks = [torch.load(tmp_path / f"{codec}-{slow_only}-{r}", weights_only=True) for r in range(world_size)]
        if codec in ("none", "fp16"):
            tiers = TIMES_SENT[tree]
            small = {tier for tier in tiers if codec == "fp16" and (tier == "cluster" or not slow_only)}
            width = {tier: 2 if tier in small else 4 for tier in tiers}
            sent = {tier: sum(rank["bytes"].get(tier, 0) for rank in ranks) for tier in tiers}
            assert sent == {tier: times * width[tier] * sum(SIZES) for tier, times in tiers.items()}
        for index, size in enumerate(SIZES):
            buckets = [torch.stack([_bucket(r, size, step) for r in range(world_size)]) for step in range(STEPS)]
            means = [[rank["means"][step][index] for rank in ranks] for step in range(STEPS)]
            for mine, bucket in zip(means, buckets, strict=True):
                assert all(torch.equal(mean, mine[0]) for mean in mine), f"{codec}: ranks must get the same bits"
                if not _codec(codec).error_feedback:
                    lossy = CODECS.get(codec).lossy
                    torch.testing.assert_close(mine[0], bucket.mean(0), **LOSSY if lossy else {})
            if _codec(codec).error_feedback:
                # With error feedback all that has not arrived is kept, once.
                kept = torch.stack([rank["residuals"][f"p{size}"] for rank in ranks]).mean(0)
                arrived = torch.stack([mine[0] for mine in means]).sum(0)
                torch.testing.assert_close(arrived + kept, torch.stack(buckets).mean(1).sum(0), rtol=1e-3, atol=1e-4)


GROUP_TIMEOUT = timedelta(seconds=1)


def _wait_for_a_late_peer(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=GROUP_TIMEOUT)
    averager = BucketAverager(_exchange("none", ()))
    if rank == 1:
        store.wait(["waiting"])
        # What is tested is a timeout that must not strike, so its time has to pass.
        time.sleep(2 * GROUP_TIMEOUT.total_seconds())
    mean = averager.start(torch.full((10,), float(rank)), (("p", torch.Size([10])),))
    if rank == 0:
        store.set("waiting", "")
    assert (mean.wait() == 0.5).all()
    averager.release()
    os._exit(0)


def test_a_peer_may_be_later_than_its_group_was_allowed_to_be(tmp_path: Path) -> None:
    mp.spawn(_wait_for_a_late_peer, (str(tmp_path),), nprocs=2)


def _fail(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    store.set(f"connected {rank}", "")
    if rank == 2:
        # It returns from there when its own connections are up, and the others still need it until theirs are.
        store.wait(["connected 0", "connected 1"])
        os._exit(0)
    averager = BucketAverager(_exchange("none", ()))
    future = averager.start(torch.ones(1000), (("p", torch.Size([1000])),))
    try:
        future.wait()
    except RuntimeError:
        Path(f"{folder}/failed-{rank}").touch()
    averager.release()
    os._exit(0)


def test_a_dead_peer_fails_the_exchange(tmp_path: Path) -> None:
    mp.spawn(_fail, (str(tmp_path),), nprocs=3)
    assert {path.name for path in tmp_path.glob("failed-*")} == {"failed-0", "failed-1"}
