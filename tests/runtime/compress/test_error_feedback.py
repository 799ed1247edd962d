"""What becomes of what a codec leaves out, on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.compress.base import CODECS, Codec
from paceline.runtime.exchange import BucketAverager
from paceline.runtime.sync.base import flat_exchange
from tests.runtime.compress.support import bucket_of, made, round_trip

SHAPE = torch.Size([8, 7])
SETTINGS: dict[str, dict[str, Any]] = {
    **{key: {"form": "gather"} for key in ("int8", "fp8", "sign")},
    **{key: {"ratio": 0.1} for key in ("topk", "randomk")},
    "powersgd": {"rank": 1},
}
"""What a codec needs so that it leaves something out of a small bucket, also where there is but one rank."""
WITH_FEEDBACK = [name for name in CODECS.names() if made(name).error_feedback]


def exchange(averager: BucketAverager, bucket: Tensor, *, commit: bool = True) -> Tensor:
    """The mean of one step."""
    averager.begin_step(measure_norms=False)
    mean = averager.start(bucket.clone(), (("weight", SHAPE),)).wait()
    if commit:
        averager.commit_step()
    return mean


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_nothing_is_lost_but_only_late(alone: dist.ProcessGroup, name: str) -> None:
    averager = BucketAverager(flat_exchange(made(name, **SETTINGS.get(name, {})), alone, ()))
    buckets = [bucket_of(SHAPE.numel(), seed) for seed in range(30)]
    sent = [exchange(averager, bucket) for bucket in buckets]
    unsent = averager.residuals()["weight"]
    assert unsent.any()
    torch.testing.assert_close(torch.stack(sent).sum(0) + unsent, torch.stack(buckets).sum(0), rtol=1e-4, atol=1e-4)
    averager.release()


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_every_element_of_a_steady_gradient_gets_through(alone: dist.ProcessGroup, name: str) -> None:
    gradient = bucket_of(SHAPE.numel()).sign() * torch.linspace(1, 2, SHAPE.numel())

    def relative_error(*, error_feedback: bool) -> float:
        codec: Codec = made(name, error_feedback=error_feedback, **SETTINGS.get(name, {}))
        averager = BucketAverager(flat_exchange(codec, alone, ()))
        mean = torch.stack([exchange(averager, gradient) for _ in range(400)]).mean(0)
        assert bool(averager.residuals()) is error_feedback
        averager.release()
        return float(((mean - gradient).abs() / gradient.abs()).max())

    with_feedback = relative_error(error_feedback=True)
    assert with_feedback < 0.15
    assert with_feedback < 0.5 * relative_error(error_feedback=False)


def test_a_step_that_is_not_completed_leaves_no_residual(alone: dist.ProcessGroup) -> None:
    codec, bucket = made("topk", ratio=0.1), bucket_of(SHAPE.numel())
    averager = BucketAverager(flat_exchange(codec, alone, ()))
    exchange(averager, bucket, commit=False)
    assert averager.residuals() == {}
    torch.testing.assert_close(exchange(averager, bucket), round_trip(codec, bucket))
