"""The pipeline between real processes."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.runtime.compress import CODECS
from paceline.runtime.compress.topk import TopK, TopKConfig
from paceline.runtime.exchange import BucketAverager, Tiers
from paceline.runtime.knobs import NoKnobs
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


def _exchange(codec_name: str, levels: Sequence[Level], *, slow_only: bool) -> Tiers:
    codec = TopK(TopKConfig(ratio=0.3)) if codec_name == "topk" else CODECS.get(codec_name)(NoKnobs())
    assert dist.group.WORLD is not None
    return Tiers(codec, dist.group.WORLD, levels, levels=levels, chunk_bytes=4 * CHUNK_ELEMENTS, slow_only=slow_only)


def _bucket(rank: int, size: int, step: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + 10 * size + rank))


CODED = [(codec, slow_only) for codec in CODECS.names() for slow_only in (False, True)]


def _average(rank: int, tree: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    levels, world_size = TREES[tree]
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size
    )
    for codec, slow_only in CODED:
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
    for codec, slow_only in CODED:
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
                if codec != "topk":
                    lossy = CODECS.get(codec).lossy
                    torch.testing.assert_close(mine[0], bucket.mean(0), **LOSSY if lossy else {})
            if codec == "topk":
                # With error feedback all that has not arrived is kept, once.
                kept = torch.stack([rank["residuals"][f"p{size}"] for rank in ranks]).mean(0)
                arrived = torch.stack([mine[0] for mine in means]).sum(0)
                torch.testing.assert_close(arrived + kept, torch.stack(buckets).mean(1).sum(0), rtol=1e-3, atol=1e-4)


def _fail(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    if rank == 2:
        os._exit(0)
    averager = BucketAverager(_exchange("none", (), slow_only=False))
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
