"""What every codec promises, for every registered codec and the ends of its knobs."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.compress.base import CODECS, BlockCodec
from paceline.runtime.compress.topk import TopK, TopKConfig
from paceline.runtime.exchange import BucketAverager, Ring

UNIT_ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}


def configured() -> Iterator[BlockCodec]:
    for name in CODECS.names():
        codec = CODECS.get(name)
        if not issubclass(codec, BlockCodec):
            continue
        fields = dataclasses.fields(codec.Config)  # type: ignore[arg-type]
        grids = [field.metadata["domain"].grid(3) for field in fields]
        for values in itertools.product(*grids):
            yield codec(codec.Config(**dict(zip((field.name for field in fields), values, strict=True))))


def codec_id(codec: BlockCodec) -> str:
    return f"{codec.name}-{codec.payload_bytes(1000)}-{codec.error_feedback}"


every_codec = pytest.mark.parametrize("codec", list(configured()), ids=codec_id)
every_size = pytest.mark.parametrize("elements", [1, 7, 1000])


def bucket_of(elements: int, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: BlockCodec, bucket: Tensor) -> Tensor:
    out = torch.zeros_like(bucket)
    codec.decode(codec.encode(bucket), out)
    return out


@every_codec
@every_size
def test_the_payload_has_the_bytes_of_the_formula(codec: BlockCodec, elements: int) -> None:
    payload = codec.encode(bucket_of(elements))
    assert sum(tensor.numel() * tensor.element_size() for tensor in payload) == codec.payload_bytes(elements)
    assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in payload)


@every_codec
@every_size
def test_encoding_leaves_its_input_alone(codec: BlockCodec, elements: int) -> None:
    bucket = bucket_of(elements)
    codec.encode(bucket)
    assert torch.equal(bucket, bucket_of(elements))


@every_codec
def test_decoding_adds(codec: BlockCodec) -> None:
    bucket, start = bucket_of(1000), bucket_of(1000, seed=1)
    out = start.clone()
    codec.decode(codec.encode(bucket), out)
    torch.testing.assert_close(out, start + round_trip(codec, bucket))


@every_codec
@every_size
def test_a_round_trip_is_a_contraction_and_exact_unless_lossy(codec: BlockCodec, elements: int) -> None:
    bucket = bucket_of(elements)
    decoded = round_trip(codec, bucket)
    assert torch.equal(decoded, bucket) or codec.lossy
    assert (bucket - decoded).norm() < bucket.norm()


@every_codec
def test_a_bucket_of_zeros_stays_zero(codec: BlockCodec) -> None:
    assert not round_trip(codec, torch.zeros(100)).any()


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_gradient_stays_visible(codec: BlockCodec, value: float) -> None:
    bucket = bucket_of(1000)
    bucket[17] = value
    assert not round_trip(codec, bucket).isfinite().all()


linear_codecs = pytest.mark.parametrize("codec", [c for c in configured() if c.linear], ids=codec_id)


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


@linear_codecs
def test_a_cast_rounds_to_the_nearest(codec: BlockCodec) -> None:
    bucket = bucket_of(1000)
    roundoff = UNIT_ROUNDOFF[codec.encode(bucket)[0].dtype]
    assert ((round_trip(codec, bucket) - bucket).abs() <= roundoff * bucket.abs() + 2**-25).all()


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200),
    st.floats(0.001, 0.5),
)
def test_topk_drops_at_most_its_share_of_the_energy(values: list[float], ratio: float) -> None:
    codec = TopK(TopKConfig(ratio=ratio))
    bucket = torch.tensor(values)
    kept = codec.payload_bytes(len(values)) // 8
    dropped = (bucket - round_trip(codec, bucket)).double().square().sum()
    assert 1 <= kept <= len(values)
    assert dropped <= (1 - kept / len(values)) * bucket.double().square().sum() * (1 + 1e-9)


def test_topk_sends_the_largest_magnitudes_as_they_are() -> None:
    bucket = torch.tensor([0.5, -4.0, 1.0, 3.0])
    assert round_trip(TopK(TopKConfig(ratio=0.5)), bucket).tolist() == [0.0, -4.0, 0.0, 3.0]


def exchange(averager: BucketAverager, bucket: Tensor, *, commit: bool = True) -> Tensor:
    averager.begin_step(measure_norms=False)
    mean = averager.start(bucket.clone(), (("weight", bucket.shape),)).wait()
    if commit:
        averager.commit_step()
    return mean


def test_with_error_feedback_nothing_is_lost_but_only_late(alone: dist.ProcessGroup) -> None:
    averager = BucketAverager(Ring(TopK(TopKConfig(ratio=0.1)), alone, ()))
    buckets = [bucket_of(50, seed) for seed in range(30)]
    sent = [exchange(averager, bucket) for bucket in buckets]
    assert torch.count_nonzero(sent[0]) == 5
    unsent = averager.residuals()["weight"]
    assert unsent.any()
    torch.testing.assert_close(torch.stack(sent).sum(0) + unsent, torch.stack(buckets).sum(0))


def test_with_error_feedback_every_element_of_a_steady_gradient_gets_through(alone: dist.ProcessGroup) -> None:
    gradient = torch.linspace(1, 2, 20)

    def relative_error(*, error_feedback: bool) -> Tensor:
        codec = TopK(TopKConfig(ratio=0.1, error_feedback=error_feedback))
        averager = BucketAverager(Ring(codec, alone, ()))
        mean = torch.stack([exchange(averager, gradient) for _ in range(200)]).mean(0)
        return ((mean - gradient).abs() / gradient).max()

    assert relative_error(error_feedback=True) < 0.15
    assert relative_error(error_feedback=False) == 1.0


def test_a_step_that_is_not_completed_leaves_no_residual(alone: dist.ProcessGroup) -> None:
    codec = TopK(TopKConfig(ratio=0.1))
    averager = BucketAverager(Ring(codec, alone, ()))
    exchange(averager, bucket_of(50), commit=False)
    assert averager.residuals() == {}
    torch.testing.assert_close(exchange(averager, bucket_of(50)), round_trip(codec, bucket_of(50)))
