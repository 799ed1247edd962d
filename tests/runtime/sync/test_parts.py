"""How parameters are cut, and when parts are due."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.runtime.sync.parts import Part, cut, stagger


def parameters(sizes: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(str(index), nn.Parameter(torch.empty(size))) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 16))
def test_cut_keeps_the_order_and_no_run_is_larger_than_its_part_and_one_parameter(sizes: list[int], count: int) -> None:
    named = parameters(sizes)
    runs = cut(named, count)
    assert len(runs) == count
    assert list(chain.from_iterable(runs)) == named
    for run in runs:
        assert sum(parameter.numel() for _, parameter in run) <= sum(sizes) / count + max(sizes, default=0)


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from(["even", "2,1", "1,3,1"]))
def test_every_parameter_is_due_once_in_its_period_and_exchanges_are_spread_evenly(
    period: int, fragments: int, layer_periods: str
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(24)))
    parts = stagger(model, period=period, layer_periods=layer_periods, fragments=fragments, bucket_bytes=100)
    assert sorted(name for part in parts for bucket in part.buckets for name, _ in bucket.layout) == sorted(
        name for name, _ in model.named_parameters()
    )
    for part in parts:
        assert sum(part.is_due(step) for step in range(100, 100 + part.period)) == 1
        # The last fragment comes at the end of the period, as one that is not cut would.
        assert part.is_due(0) or fragments > 1
    if layer_periods == "even":
        at_once = [sum(part.is_due(step) for part in parts) for step in range(period)]
        assert max(at_once) <= -(-len(parts) // period)


def test_buckets_hold_what_fits() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    (part,) = stagger(model, period=2, layer_periods="even", fragments=1, bucket_bytes=100)
    assert isinstance(part, Part)
    assert [[name for name, _ in bucket.layout] for bucket in part.buckets] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
        ["2.weight", "2.bias"],
        ["3.weight", "3.bias"],
    ]
