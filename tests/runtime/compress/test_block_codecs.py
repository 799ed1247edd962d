"""What every block codec promises, in every setting of its knobs."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec
from paceline.runtime.compress.blocks import BLOCK, PIECE
from paceline.runtime.exchange.packing import Packing
from tests.runtime.compress.support import bucket_of, configured, ident, made, round_trip

UNIT_ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}
TINY = torch.finfo(torch.float32).tiny
sizes = st.integers(1, 3 * BLOCK) | st.integers(PIECE - 9, PIECE + 9)

# What happens to payloads does not change them.
ENCODINGS = list(configured(BlockCodec, leaving=("error_feedback", "form", "reduce")))
every_codec = pytest.mark.parametrize(("name", "settings"), ENCODINGS, ids=ident)
# A range is part of the format of fp16; those who need more have bf16.
every_codec_with_the_range_of_fp32 = pytest.mark.parametrize(
    ("name", "settings"), [each for each in ENCODINGS if each[0] != "fp16"], ids=ident
)


@every_codec
@given(elements=sizes)
def test_the_payload_has_the_bytes_of_the_formula(name: str, settings: dict[str, object], elements: int) -> None:
    codec = made(name, **settings)
    payload = codec.encode(bucket_of(elements))
    assert sum(tensor.numel() * tensor.element_size() for tensor in payload) == codec.payload_bytes(elements)
    assert codec.bucket_bytes([torch.Size([elements]), torch.Size([0, 5])]) == codec.payload_bytes(elements)
    assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in payload)


@every_codec
@given(elements=sizes)
def test_a_payload_survives_being_packed_and_its_input_being_encoded(
    name: str, settings: dict[str, object], elements: int
) -> None:
    codec, bucket = made(name, **settings), bucket_of(elements)
    packing = Packing(codec)
    received = packing.unpack(packing.pack(codec.encode(bucket)), elements)
    assert torch.equal(bucket, bucket_of(elements))
    out = torch.zeros(elements)
    codec.decode(received, out)
    assert torch.equal(out, round_trip(codec, bucket))


@every_codec
@given(elements=sizes)
def test_decoding_adds(name: str, settings: dict[str, object], elements: int) -> None:
    codec, bucket, start = made(name, **settings), bucket_of(elements), bucket_of(elements, seed=1)
    out = start.clone()
    codec.decode(codec.encode(bucket), out)
    torch.testing.assert_close(out, start + round_trip(codec, bucket))


def cast_error(roundoff: float, smallest: float) -> Callable[[BlockCodec, Tensor], Tensor]:
    return lambda codec, x: (roundoff * x.abs() + smallest).square().sum()


def fp8_error(codec: BlockCodec, x: Tensor) -> Tensor:
    values = torch.finfo(codec.dtype)  # type: ignore[attr-defined]
    roundoff, fraction = values.eps / 2, values.smallest_normal / values.max
    return roundoff**2 * (1 + BLOCK * fraction**2) * x.square().sum()


def sign_error(codec: BlockCodec, x: Tensor) -> Tensor:
    """And what it may not exceed, whatever the block."""
    error = torch.stack([part.square().sum() - part.abs().sum() ** 2 / len(part) for part in x.split(BLOCK)]).sum()
    assert error <= (1 - 1 / BLOCK) * x.square().sum() * (1 + 1e-12)
    return error


def topk_error(codec: BlockCodec, x: Tensor) -> Tensor:
    return (1 - codec.payload_bytes(len(x)) / 8 / len(x)) * x.square().sum()


LARGEST_ERROR: dict[str, Callable[[BlockCodec, Tensor], Tensor]] = {
    "none": cast_error(0, 0),
    "fp16": cast_error(2**-11, 2**-25),
    "bf16": cast_error(2**-8, 2**-134),
    "int8": lambda codec, x: BLOCK / 254**2 * x.square().sum(),
    "fp8": fp8_error,
    "sign": sign_error,
    "topk": topk_error,
}
"""|x - decode(encode(x))|^2 at most, as the docstrings say."""


@every_codec
@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=BLOCK + 40), st.integers(0, 2**30))
def test_what_is_lost_is_within_the_bound(
    name: str, settings: dict[str, object], values: list[float], seed: int
) -> None:
    codec, bucket = made(name, **settings), torch.tensor(values)
    for each in (bucket, bucket * bucket_of(len(bucket), seed).clamp(-1, 1)):
        error = (each.double() - round_trip(codec, each)).square().sum()
        # Arithmetic is in fp32, whose smallest normal number is as fine as scales get.
        rounding = 1e-6 * each.double().square().sum() * codec.lossy + len(each) * TINY**2
        assert error <= LARGEST_ERROR[name](codec, each.double()) + rounding


@every_codec
def test_a_bucket_of_zeros_stays_zero(name: str, settings: dict[str, object]) -> None:
    assert not round_trip(made(name, **settings), torch.zeros(1000)).any()


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("elements", "place"), [(1000, 17), (1000, 999), (1, 0), (4 * PIECE, PIECE + 1)])
def test_a_diverged_gradient_stays_visible(
    name: str, settings: dict[str, object], value: float, elements: int, place: int
) -> None:
    bucket = bucket_of(elements)
    bucket[place] = value
    assert not round_trip(made(name, **settings), bucket).isfinite().all()


@every_codec_with_the_range_of_fp32
@pytest.mark.parametrize("exponent", [-100, 100])
def test_huge_and_tiny_gradients_fare_as_all_others(name: str, settings: dict[str, object], exponent: int) -> None:
    codec, bucket = made(name, **settings), bucket_of(1000)
    assert torch.equal(round_trip(codec, bucket * 2.0**exponent), round_trip(codec, bucket) * 2.0**exponent)


@every_codec
def test_numbers_below_all_normal_ones_do_no_harm(name: str, settings: dict[str, object]) -> None:
    bucket = bucket_of(1000) * 1e-40
    assert (round_trip(made(name, **settings), bucket) - bucket).abs().max() <= TINY / 2


linear_codecs = pytest.mark.parametrize(
    "codec", [codec for name, _ in ENCODINGS if (codec := made(name)).linear], ids=lambda codec: codec.name
)


@linear_codecs
def test_payloads_of_a_linear_codec_may_be_summed_on_the_wire(codec: BlockCodec) -> None:
    buckets = [bucket_of(1000, seed) for seed in range(4)]
    payloads = [codec.encode(bucket) for bucket in buckets]
    assert all(len(payload) == 1 for payload in payloads)
    summed = torch.zeros(1000)
    codec.decode((torch.stack([payload[0] for payload in payloads]).sum(0),), summed)
    separate = sum(round_trip(codec, bucket) for bucket in buckets)
    roundoff = UNIT_ROUNDOFF[payloads[0][0].dtype]
    magnitude = torch.stack(buckets).abs().sum(0)
    assert ((summed - separate).abs() <= 4 * roundoff * magnitude).all()


@pytest.mark.parametrize(
    ("settings", "at_owners"),
    [
        ({"name": "none"}, False),
        ({"name": "fp16"}, False),
        ({"name": "bf16", "reduce": "fp32"}, True),
        ({"name": "int8"}, True),
        ({"name": "sign"}, True),
        ({"name": "fp8", "form": "gather"}, False),
        ({"name": "topk"}, False),
        ({"name": "topk", "form": "owners"}, True),
    ],
    ids=ident,
)
def test_who_adds_up(settings: dict[str, object], at_owners: bool) -> None:
    assert made(**settings).sums_at_owners is at_owners
