"""Low-rank gradients: how good the approximation is."""

import pytest
import torch
from torch import Tensor

from paceline.runtime.compress.base import Layout
from tests.runtime.compress.support import bucket_of, converse, made


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    """A matrix of a rank."""
    return bucket_of(rows * rank, seed).view(rows, rank) @ bucket_of(rank * columns, seed + 1).view(rank, columns)


def layout_of(**shapes: tuple[int, ...]) -> Layout:
    return tuple((name, torch.Size(shape)) for name, shape in shapes.items())


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_a_sum_of_low_rank_arrives_whole(rank: int) -> None:
    codecs = [made("powersgd", rank=rank) for _ in range(2)]
    left = bucket_of(50 * rank, 9).view(50, rank)
    layout = layout_of(weight=(50, 6, 5))
    for number in range(3):
        buckets = [(left @ bucket_of(rank * 30, 10 * number + r).view(rank, 30)).view(-1) for r in range(2)]
        outcomes, _ = converse(codecs, buckets, layout)
        torch.testing.assert_close(outcomes[0].total, buckets[0] + buckets[1], rtol=1e-3, atol=1e-4)


def test_the_approximation_of_a_steady_gradient_becomes_the_best_of_its_rank() -> None:
    codec = made("powersgd", rank=3)
    left, values, right = torch.linalg.svd(bucket_of(60 * 40).view(60, 40), full_matrices=False)
    decaying = left @ torch.diag(0.5 ** torch.arange(40)) @ right
    best = left[:, :3] @ torch.diag(0.5 ** torch.arange(3)) @ right[:3]
    errors = []
    for _ in range(12):
        (outcome,), _ = converse([codec], [decaying.reshape(-1)], layout_of(weight=(60, 40)))
        errors.append(float((outcome.total.view(60, 40) - decaying).norm()))
    assert errors[0] > 1.05 * errors[-1]
    assert errors[-1] == pytest.approx(float((best - decaying).norm()), rel=1e-3)
    assert len(values) == 40


def test_what_would_not_become_smaller_is_sent_as_it_is() -> None:
    layout = layout_of(bias=(500,), narrow=(4, 100), square=(8, 8), empty=(0, 9), scalar=())
    bucket = bucket_of(500 + 400 + 64 + 1)
    (outcome,), sent = converse([made("powersgd", rank=4)], [bucket], layout)
    assert torch.equal(outcome.total, bucket)
    assert sent == 4 * len(bucket)


def test_matrices_of_equal_shape_do_not_get_mixed_up() -> None:
    layout = layout_of(a=(20, 30), bias=(5,), b=(30, 20), c=(20, 30))
    parts = [bucket_of(shape.numel(), seed) for seed, (_, shape) in enumerate(layout)]
    together, alone = made("powersgd"), [made("powersgd") for _ in layout]
    for _ in range(2):
        (outcome,), _ = converse([together], [torch.cat(parts)], layout)
        for codec, part, each, found in zip(
            alone, parts, layout, outcome.total.split([len(part) for part in parts]), strict=True
        ):
            (expected,), _ = converse([codec], [part], (each,))
            torch.testing.assert_close(found, expected.total, rtol=1e-4, atol=1e-5)


def test_another_rank_begins_anew() -> None:
    narrow, wide = made("powersgd", rank=2), made("powersgd", rank=5)
    low = matrix(20, 30, 5).view(-1)
    converse([narrow], [low], layout_of(weight=(20, 30)))
    wide.load_state(*narrow.state())
    (outcome,), _ = converse([wide], [low], layout_of(weight=(20, 30)))
    torch.testing.assert_close(outcome.total, low, rtol=1e-3, atol=1e-4)


def test_what_a_rank_keeps_stays_bounded_however_much_ranks_differ() -> None:
    codecs = [made("powersgd", rank=2) for _ in range(2)]
    kept = [torch.zeros(1200) for _ in range(2)]
    norms = []
    for _ in range(60):
        buckets = [sign * bucket_of(1200) + bucket_of(1200, 5) + own for sign, own in zip((1, -1), kept, strict=True)]
        outcomes, _ = converse(codecs, buckets, layout_of(weight=(30, 40)))
        kept = [bucket - outcome.share for bucket, outcome in zip(buckets, outcomes, strict=True)]
        norms.append(max(float(each.norm()) for each in kept))
    assert norms[-1] < 1.5 * norms[29]
