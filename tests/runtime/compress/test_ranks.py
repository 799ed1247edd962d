"""Codecs between real processes, in every form of a flat exchange."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from paceline.runtime.compress.base import CODECS, Layout
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.sync.base import flat_exchange
from tests.runtime.compress.support import bucket_of, made

RANKS = 2
STEPS = 3
LAYOUTS: tuple[Layout, ...] = (
    (("weight", torch.Size([40, 30])), ("bias", torch.Size([7]))),
    (("scale", torch.Size([1])),),
)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CODECS.names()),
    *((name, {"form": form}) for name in ("int8", "fp8", "sign", "topk") for form in ("gather", "owners")),
    *((name, {"error_feedback": False}) for name in ("int8", "topk", "randomk", "powersgd")),
    *((name, {"reduce": "fp32"}) for name in ("fp16", "bf16")),
]
OVERFLOWING = 40_000.0
"""Twice this is more than fp16 holds."""


def _bucket(layout: Layout, rank: int, step: int) -> Tensor:
    return bucket_of(sum(shape.numel() for _, shape in layout), seed=10 * step + rank)


def _train(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    for index, (name, settings) in enumerate(CASES):
        averager = BucketAverager(flat_exchange(made(name, **settings), dist.group.WORLD, ()))
        means = []
        for step in range(STEPS):
            averager.begin_step(measure_norms=False)
            futures = [averager.start(_bucket(layout, rank, step), layout) for layout in LAYOUTS]
            means.append([future.wait() for future in futures])
            averager.commit_step()
        residuals = averager.residuals()
        averager.begin_step(measure_norms=False)
        large = averager.start(torch.full((1000,), OVERFLOWING), (("large", torch.Size([1000])),)).wait()
        torch.save({"means": means, "residuals": residuals, "large": large}, f"{folder}/{index}-{rank}")
        averager.release()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each rank got, by case. Starting processes takes seconds, so they do everything at once."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(_train, (str(folder),), nprocs=RANKS)
    return [
        [torch.load(folder / f"{index}-{rank}", weights_only=True) for rank in range(RANKS)]
        for index in range(len(CASES))
    ]


every_case = pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{name} {given}" for name, given in CASES])


@every_case
def test_ranks_get_the_same_bits(outcomes: list[list[dict[str, Any]]], index: int) -> None:
    first, second = outcomes[index]
    for one, other in zip(first["means"], second["means"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_case
def test_what_did_not_arrive_is_kept_once(outcomes: list[list[dict[str, Any]]], index: int) -> None:
    name, settings = CASES[index]
    codec, ranks = made(name, **settings), outcomes[index]
    if not codec.error_feedback:
        assert not any(rank["residuals"] for rank in ranks)
        return
    for place, layout in enumerate(LAYOUTS):
        arrived = sum(step[place] for step in ranks[0]["means"])
        kept = sum(torch.cat([rank["residuals"][name] for name, _ in layout]) for rank in ranks) / RANKS
        sent = sum(_bucket(layout, rank, step) for rank in range(RANKS) for step in range(STEPS)) / RANKS
        torch.testing.assert_close(arrived + kept, sent, rtol=1e-4, atol=1e-5)


@every_case
def test_large_gradients_are_divided_before_they_are_summed(outcomes: list[list[dict[str, Any]]], index: int) -> None:
    name, _ = CASES[index]
    large = outcomes[index][0]["large"]
    assert large.isfinite().all()
    if name not in ("topk", "randomk"):
        torch.testing.assert_close(large, torch.full((1000,), OVERFLOWING), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("name", [name for name in CODECS.names() if getattr(CODECS.get(name), "faithful", False)])
def test_what_is_within_a_rounding_error_arrives_as_the_mean(outcomes: list[list[dict[str, Any]]], name: str) -> None:
    for index in (index for index, case in enumerate(CASES) if case[0] == name):
        for place, layout in enumerate(LAYOUTS):
            mean = sum(_bucket(layout, rank, 0) for rank in range(RANKS)) / RANKS
            error = outcomes[index][0]["means"][0][place] - mean
            assert error.norm() <= 0.06 * torch.as_tensor(mean).norm()
