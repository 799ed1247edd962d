"""What each block codec makes of given numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.compress import topk
from paceline.runtime.compress.blocks import BLOCK, PIECE
from tests.runtime.compress.support import bucket_of, made, round_trip


def test_int8_rounds_to_multiples_of_a_part_of_the_largest_of_the_block() -> None:
    bucket = torch.cat([torch.tensor([12.7, -0.26, 0.04]).repeat(BLOCK)[:BLOCK], torch.tensor([0.0127])])
    arrived = round_trip(made("int8"), bucket)
    torch.testing.assert_close(arrived[:3], torch.tensor([12.7, -0.3, 0.0]))
    torch.testing.assert_close(arrived[-1], torch.tensor(0.0127))


@pytest.mark.parametrize(("fp8_format", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_fp8_rounds_as_the_format_does(fp8_format: str, largest: float) -> None:
    codec = made("fp8", format=fp8_format)
    bucket = bucket_of(BLOCK - 1)
    bucket[5] = largest
    cast = bucket.to(codec.dtype).float()
    assert torch.equal(round_trip(codec, bucket), cast)
    assert torch.equal(round_trip(codec, bucket / 1024), cast / 1024)


@given(st.integers(1, 2 * BLOCK))
def test_sign_sends_every_sign_and_the_mean_magnitude_of_each_block(elements: int) -> None:
    bucket = bucket_of(elements, seed=elements)
    expected = torch.cat([part.sign() * part.abs().mean() for part in bucket.split(BLOCK)])
    torch.testing.assert_close(round_trip(made("sign"), bucket), expected)


def test_sign_puts_the_first_element_in_the_lowest_bit() -> None:
    _, signs = made("sign").encode(torch.tensor([1.0, -1, -1, -1, -1, -1, -1, 1, -1, 1]))
    assert signs.tolist() == [0b10000001, 0b10]


def test_topk_sends_the_largest_magnitudes_as_they_are() -> None:
    bucket = torch.tensor([0.5, -4.0, 1.0, 3.0])
    assert round_trip(made("topk", ratio=0.5), bucket).tolist() == [0.0, -4.0, 0.0, 3.0]


ELEMENTS = 5 * PIECE + 3
LARGE = {
    "normal": bucket_of(ELEMENTS),
    "heavy tails": bucket_of(ELEMENTS) ** 9,
    "ramp": torch.arange(ELEMENTS) - ELEMENTS / 3,
    "one value": torch.full((ELEMENTS,), -2.0),
    "few values": (3 * bucket_of(ELEMENTS)).round(),
    "mostly zeros": torch.where(torch.arange(ELEMENTS) % 100 == 0, bucket_of(ELEMENTS), torch.zeros(())),
    "large where nobody looks": bucket_of(ELEMENTS)
    + 100.0 * (torch.arange(ELEMENTS) % (ELEMENTS // topk.SAMPLE | 1) != 0),
    "large where all look": bucket_of(ELEMENTS) + 100.0 * (torch.arange(ELEMENTS) % (ELEMENTS // topk.SAMPLE | 1) == 0),
    "not a number": torch.where(torch.arange(ELEMENTS) % 50 == 7, torch.nan, bucket_of(ELEMENTS)),
    "not one number": torch.full((ELEMENTS,), torch.nan),
}


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05, 0.5])
@pytest.mark.parametrize("kind", LARGE)
def test_topk_selects_exactly_the_largest_of_a_large_bucket(kind: str, ratio: float) -> None:
    bucket = LARGE[kind]
    values, indices = made("topk", ratio=ratio).encode(bucket)
    assert torch.equal(values.view(torch.int32), bucket[indices].view(torch.int32))
    assert len(indices.unique()) == len(indices)
    expected = bucket.abs().topk(len(values)).values
    torch.testing.assert_close(values.abs().sort(descending=True).values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05])
def test_topk_looks_closely_at_few(ratio: float) -> None:
    kept = round(ratio * ELEMENTS)
    candidates = topk._candidates(LARGE["normal"], kept)
    assert candidates is not None
    assert kept <= len(candidates) < (3 if ratio < 0.01 else 2) * kept
