"""What every joint codec promises, in every setting of its knobs, among ranks without a network."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.runtime.compress.base import Joint, JointCodec, Layout
from tests.runtime.compress.support import bucket_of, configured, converse, ident, made

LAYOUT: Layout = (
    ("embedding", torch.Size([60, 40])),
    ("bias", torch.Size([7])),
    ("scale", torch.Size([])),
    ("kernel", torch.Size([30, 5, 3, 3])),
    ("small", torch.Size([3, 2])),
    ("output", torch.Size([60, 40])),
)
ELEMENTS = sum(shape.numel() for _, shape in LAYOUT)
RANKS = 3

every_codec = pytest.mark.parametrize(("name", "settings"), list(configured(JointCodec)), ids=ident)


def team(name: str, settings: dict[str, Any], ranks: int = RANKS) -> list[JointCodec]:
    """A codec per rank."""
    return [made(name, **settings) for _ in range(ranks)]


def step(codecs: Sequence[JointCodec], number: int, scale: float = 1.0) -> list[Joint]:
    """One step on buckets of its own; what the ranks got."""
    buckets = [bucket_of(ELEMENTS, seed=100 * number + rank) * scale for rank in range(len(codecs))]
    outcomes, _ = converse(codecs, buckets, LAYOUT)
    return outcomes


@every_codec
def test_every_rank_sends_what_the_formula_says(name: str, settings: dict[str, Any]) -> None:
    codecs = team(name, settings)
    for layout in (LAYOUT, LAYOUT[1:3], LAYOUT[:1], LAYOUT[4:5]):
        shapes = [shape for _, shape in layout]
        buckets = [bucket_of(sum(shape.numel() for shape in shapes), rank) for rank in range(RANKS)]
        _, sent = converse(codecs, buckets, layout)
        assert sent == codecs[0].bucket_bytes(shapes)


@every_codec
def test_shares_add_up_to_the_total_that_all_ranks_get(name: str, settings: dict[str, Any]) -> None:
    codecs = team(name, settings)
    for number in range(3):
        outcomes = step(codecs, number)
        for outcome in outcomes:
            assert torch.equal(outcome.total, outcomes[0].total)
        torch.testing.assert_close(sum(outcome.share for outcome in outcomes), outcomes[0].total, rtol=1e-4, atol=1e-4)


@every_codec
def test_a_bucket_is_left_alone_and_what_comes_back_is_the_callers(name: str, settings: dict[str, Any]) -> None:
    codecs, buckets = team(name, settings), [bucket_of(ELEMENTS, rank) for rank in range(RANKS)]
    outcomes, _ = converse(codecs, buckets, LAYOUT)
    for total, share in outcomes:
        total.fill_(-1)
        share.fill_(-1)
    assert all(torch.equal(bucket, bucket_of(ELEMENTS, rank)) for rank, bucket in enumerate(buckets))
    untouched = team(name, settings)
    step(untouched, 0)
    assert torch.equal(step(codecs, 1)[0].total, step(untouched, 1)[0].total)


@every_codec
def test_what_is_kept_of_a_bucket_does_not_grow_by_being_encoded(name: str, settings: dict[str, Any]) -> None:
    codecs = team(name, settings)
    for number in range(3):
        for rank, outcome in enumerate(step(codecs, number)):
            bucket = bucket_of(ELEMENTS, seed=100 * number + rank)
            if codecs[rank].error_feedback:
                assert (bucket - outcome.share).norm() <= bucket.norm()


@every_codec
def test_a_restored_codec_goes_on_with_the_same_bits(name: str, settings: dict[str, Any]) -> None:
    whole, first = team(name, settings), team(name, settings)
    for number in range(3):
        step(whole, number)
        step(first, number)
    restored = team(name, settings)
    for codec in restored:
        codec.load_state(*first[0].state())
    for number in range(3, 6):
        for expected, found in zip(step(whole, number), step(restored, number), strict=True):
            assert torch.equal(expected.total, found.total)
            assert torch.equal(expected.share, found.share)


@every_codec
def test_a_step_that_was_not_completed_is_forgotten(name: str, settings: dict[str, Any]) -> None:
    disturbed, calm = team(name, settings, ranks=1), team(name, settings, ranks=1)
    step(disturbed, 0)
    step(calm, 0)
    converse(disturbed, [bucket_of(ELEMENTS, seed=77)], LAYOUT, commit=False)
    assert torch.equal(step(disturbed, 1)[0].total, step(calm, 1)[0].total)


@every_codec
def test_zeros_stay_zeros_and_do_not_spoil_what_follows(name: str, settings: dict[str, Any]) -> None:
    codecs = team(name, settings)
    assert not step(codecs, 0, scale=0.0)[0].total.any()
    assert not step(codecs, 1, scale=0.0)[0].total.any()
    total = step(codecs, 2)[0].total
    assert total.isfinite().all()
    assert total.any()


@every_codec
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_huge_and_tiny_gradients_fare_as_all_others(name: str, settings: dict[str, Any], scale: float) -> None:
    scaled, plain = team(name, settings), team(name, settings)
    for number in range(3):
        found, expected = (step(codecs, number, each) for codecs, each in ((scaled, scale), (plain, 1.0)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.total / scale, other.total, rtol=1e-3, atol=1e-3)


@every_codec
def test_a_diverged_gradient_is_seen_by_all_ranks(name: str, settings: dict[str, Any]) -> None:
    codecs = team(name, {**settings, "ratio": 0.5} if name == "randomk" else settings)
    bad = bucket_of(ELEMENTS)
    bad[5:25] = torch.nan
    buckets: list[Tensor] = [bad, *(bucket_of(ELEMENTS, rank) for rank in range(1, RANKS))]
    outcomes, _ = converse(codecs, buckets, LAYOUT)
    assert not any(outcome.total.isfinite().all() for outcome in outcomes)
