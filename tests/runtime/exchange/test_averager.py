"""What an exchange costs, and what becomes of what it left unsent."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Layout
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.compress.topk import TopK, TopKConfig
from paceline.runtime.exchange import BucketAverager, Ring, StepMeter, all_gather_bytes, all_reduce_bytes
from paceline.runtime.knobs import NoKnobs


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_ranks_send_even_parts_of_exactly_what_a_ring_needs(payload: int, world_size: int) -> None:
    parts = [all_reduce_bytes(payload, world_size, rank) for rank in range(world_size)]
    assert sum(parts) == 2 * (world_size - 1) * payload
    assert max(parts) - min(parts) <= 1
    assert world_size * all_gather_bytes(payload, world_size) == world_size * (world_size - 1) * payload


def test_bytes_are_counted_by_tier() -> None:
    meter = StepMeter()
    for tier, count in (("node", 3), ("cluster", 5), ("node", 4)):
        meter.add_bytes(tier, count)
    assert meter.wire_bytes == {"node": 7, "cluster": 5}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=12))
def test_seconds_in_which_exchanges_overlap_count_once(intervals: list[tuple[int, int]]) -> None:
    meter = StepMeter(intervals=[(float(start), float(start + length)) for start, length in intervals])
    busy = {second for start, length in intervals for second in range(start, start + length)}
    assert meter.busy_seconds() == len(busy)


def averager(codec: BlockCodec, group: dist.ProcessGroup, carried: dict[str, Tensor] | None = None) -> BucketAverager:
    made = BucketAverager(Ring(codec, group, ()))
    made.carry(carried or {})
    return made


def of(**counts: int) -> Layout:
    """The layout of a bucket of flat parameters."""
    return tuple((name, torch.Size([count])) for name, count in counts.items())


def exchange(averager: BucketAverager, layout: Layout, *, commit: bool = True) -> Tensor:
    """Exchange a bucket of zeros, so that nothing but residuals arrives."""
    averager.begin_step(measure_norms=False)
    mean = averager.start(torch.zeros(sum(shape.numel() for _, shape in layout)), layout).wait()
    if commit:
        averager.commit_step()
    return mean


RESIDUALS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}


def test_residual_finds_its_parameter_in_another_layout_and_is_delivered_once(alone: dist.ProcessGroup) -> None:
    exact = averager(NoCodec(NoKnobs()), alone, RESIDUALS)
    layout = of(c=1, b=1, a=2)
    assert exchange(exact, layout).tolist() == [0.0, 3.0, 1.0, 2.0]
    assert exact.residuals() == {}
    assert exchange(exact, layout).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_residual_of_a_parameter_that_was_not_exchanged_is_kept(alone: dist.ProcessGroup) -> None:
    exact = averager(NoCodec(NoKnobs()), alone, RESIDUALS)
    assert exchange(exact, of(b=1)).tolist() == [3.0]
    assert {name: value.tolist() for name, value in exact.residuals().items()} == {"a": [1.0, 2.0]}


def test_what_is_deferred_is_in_the_next_exchange_with_all_that_came_before(alone: dist.ProcessGroup) -> None:
    exact, layout = averager(NoCodec(NoKnobs()), alone, RESIDUALS), of(a=2)
    for kept in ([2.0, 3.0], [3.0, 4.0]):
        exact.begin_step(measure_norms=False)
        exact.defer(torch.ones(2), layout)
        exact.commit_step()
        assert exact.residuals()["a"].tolist() == kept
    exact.begin_step(measure_norms=False)
    exact.defer(torch.ones(2), layout)
    # The step fails.
    assert exchange(exact, layout).tolist() == [3.0, 4.0]
    assert set(exact.residuals()) == {"b"}
    assert exchange(exact, layout).tolist() == [0.0, 0.0]


class Late(Ring):
    """Arrives when it is told to, and drops everything."""

    def start(
        self, bucket: Tensor, layout: Layout, unsent: Tensor | None, meter: StepMeter
    ) -> torch.futures.Future[Tensor]:
        self.arriving: torch.futures.Future[Tensor] = torch.futures.Future()
        self.bucket, self.unsent = bucket, unsent
        return self.arriving

    def arrive(self) -> None:
        assert self.unsent is not None
        self.unsent.add_(self.bucket)
        self.arriving.set_result(self.bucket.zero_())


def test_exchange_may_outlive_its_step(alone: dist.ProcessGroup) -> None:
    late = Late(TopK(TopKConfig(ratio=0.3)), alone, ())
    averager = BucketAverager(late)
    averager.begin_step(measure_norms=False)
    mean = averager.start(torch.tensor([1.0, 2.0]), of(a=2))
    averager.commit_step()
    assert averager.meter.busy_seconds() == 0.0
    averager.begin_step(measure_norms=False)
    late.arrive()
    assert mean.wait().tolist() == [0.0, 0.0]
    averager.commit_step()
    assert averager.meter.busy_seconds() > 0.0
    assert averager.meter.busy_seconds() == 0.0
    assert averager.residuals()["a"].tolist() == [1.0, 2.0]


def test_residual_of_a_step_that_failed_is_delivered_by_the_next(alone: dist.ProcessGroup) -> None:
    exact = averager(NoCodec(NoKnobs()), alone, RESIDUALS)
    exchange(exact, of(a=2), commit=False)
    assert set(exact.residuals()) == {"a", "b"}
    assert exchange(exact, of(a=2)).tolist() == [1.0, 2.0]


def test_carrying_copies(alone: dist.ProcessGroup) -> None:
    given_away = {"a": torch.tensor([1.0])}
    exact = averager(NoCodec(NoKnobs()), alone, given_away)
    given_away["a"].zero_()
    assert exchange(exact, of(a=1)).tolist() == [1.0]


def test_what_topk_leaves_of_a_residual_is_still_there(alone: dist.ProcessGroup) -> None:
    sparse = averager(TopK(TopKConfig(ratio=0.3)), alone, RESIDUALS)
    layout = of(a=2, b=1)
    assert exchange(sparse, layout).tolist() == [0.0, 0.0, 3.0]
    assert {name: value.tolist() for name, value in sparse.residuals().items()} == {"a": [1.0, 2.0], "b": [0.0]}
    exact = averager(NoCodec(NoKnobs()), alone, sparse.residuals())
    assert exchange(exact, layout).tolist() == [1.0, 2.0, 0.0]


def test_norms_are_measured_on_request(alone: dist.ProcessGroup) -> None:
    exact = averager(NoCodec(NoKnobs()), alone)
    for wanted, norm in ((True, 25.0), (False, 0.0)):
        exact.begin_step(measure_norms=wanted)
        exact.start(torch.tensor([3.0, 4.0]), of(a=2)).wait()
        exact.commit_step()
        assert (exact.meter.local_square_norm, exact.meter.mean_square_norm) == (norm, norm)


def test_released_averager_has_no_group(alone: dist.ProcessGroup) -> None:
    exact = averager(NoCodec(NoKnobs()), alone)
    exact.release()
    with pytest.raises(AssertionError, match="released"):
        exact.start(torch.zeros(1), of(a=1))
