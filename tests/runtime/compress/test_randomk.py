"""Random sparsification: which elements, how often, and what arrives in the end."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.compress.randomk import choose
from tests.runtime.compress.support import bucket_of, converse, made

DRAWS = 5_000


@given(st.integers(1, 5000), st.floats(0.001, 0.5), st.integers(0, 2**32 - 1))
def test_as_many_different_indices_are_chosen_as_asked_for(count: int, ratio: float, seed: int) -> None:
    kept = math.ceil(ratio * count)
    chosen = choose(count, kept, torch.Generator().manual_seed(seed))
    assert len(chosen) == len(chosen.unique()) == kept
    assert 0 <= chosen.min() <= chosen.max() < count


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (10, 3), (7, 4), (100, 5), (33, 1), (60, 30)])
def test_every_element_is_chosen_equally_often(count: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(0)
    times = torch.zeros(count)
    for _ in range(DRAWS):
        times[choose(count, kept, generator)] += 1
    share = kept / count
    deviation = math.sqrt(DRAWS * share * (1 - share))
    assert (times - DRAWS * share).abs().max() <= 5 * deviation


def test_neighbours_are_not_always_chosen_together() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = {tuple(sorted(choose(6, 2, generator).tolist())) for _ in range(300)}
    assert {(0, 1), (0, 3), (0, 5), (2, 4)} < pairs


def test_without_error_feedback_what_arrives_is_unbiased() -> None:
    codecs = [made("randomk", ratio=0.1, error_feedback=False) for _ in range(2)]
    buckets = [bucket_of(40, seed) for seed in range(2)]
    mean, square, steps = torch.zeros(40), torch.zeros(40), 4000
    for _ in range(steps):
        (outcome, _), _ = converse(codecs, buckets, (("weight", torch.Size([40])),))
        mean += outcome.total / steps
        square += outcome.total.square() / steps
    standard_error = ((square - mean.square()) / steps).sqrt()
    assert ((mean - sum(buckets)).abs() <= 5 * standard_error).all()


def test_with_error_feedback_values_are_sent_as_they_are_and_each_step_chooses_anew() -> None:
    codec, bucket = made("randomk", ratio=0.25), bucket_of(40)
    chosen = set()
    for _ in range(3):
        (outcome,), _ = converse([codec], [bucket], (("weight", torch.Size([40])),))
        places = outcome.total.nonzero().view(-1)
        assert torch.equal(outcome.total[places], bucket[places])
        chosen.add(tuple(places.tolist()))
    assert len(chosen) == 3


def test_buckets_of_a_step_choose_differently() -> None:
    outcomes = [
        converse([made("randomk")], [bucket_of(1000)], ((name, torch.Size([1000])),))[0][0] for name in ("one", "other")
    ]
    assert not torch.equal(outcomes[0].total, outcomes[1].total)


def test_energy_is_lost_in_proportion() -> None:
    codec, bucket = made("randomk", ratio=0.2), bucket_of(50)
    lost = []
    for _ in range(2000):
        (outcome,), _ = converse([codec], [bucket], (("weight", torch.Size([50])),))
        lost.append(float((bucket - outcome.share).square().sum() / bucket.square().sum()))
    assert sum(lost) / len(lost) == pytest.approx(0.8, abs=0.01)
