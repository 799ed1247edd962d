"""What a shard makes of gradients that come in any order."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.runtime.exchange import Shard

PARTS = 3


class Recorder:
    """An optimizer that only notes what it is given."""

    def __init__(self) -> None:
        self.totals: list[float] = []
        self.ages: list[float] = []

    def __call__(self, total: Tensor, age: float) -> Tensor:
        self.totals.append(float(total))
        self.ages.append(age)
        return torch.zeros(1)


def shard(recorder: Recorder, lateness: int) -> Shard:
    return Shard(torch.zeros(1), parts=PARTS, lateness=lateness, version=0, update=recorder)


def bit(step: int, part: int) -> Tensor:
    """A gradient that can be told apart in any sum."""
    return torch.tensor([2.0 ** ((step - 1) * PARTS + part)], dtype=torch.float64)


def test_without_lateness_updates_are_the_steps_in_order() -> None:
    recorder = Recorder()
    kept = shard(recorder, 0)
    for step, part in [(2, 0), (2, 1), (2, 2), (1, 2), (1, 0), (1, 1)]:
        kept.push(step, part, 0, bit(step, part))
    assert recorder.totals == [0b111, 0b111000]
    assert recorder.ages == [0.0, 1.0]


def test_a_slow_part_delays_nobody_before_it_is_due() -> None:
    recorder = Recorder()
    kept = shard(recorder, 1)
    for step, part in [(1, 1), (1, 2), (2, 0)]:
        kept.push(step, part, 0, bit(step, part))
    assert recorder.totals == [0b001110]
    for step, part in [(2, 1), (2, 2), (3, 0)]:
        kept.push(step, part, 1, bit(step, part))
    assert kept.pull(0)[0] == 1, "the part of step 1 is due in update 2"
    kept.push(1, 0, 0, bit(1, 0))
    assert recorder.totals == [0b001110, 0b110001]


@given(staleness=st.integers(0, 6), steps=st.integers(1, 6), ranks=st.integers(1, 5), chance=st.randoms())
def test_every_gradient_is_applied_once_and_within_the_bound(
    staleness: int, steps: int, ranks: int, chance: random.Random
) -> None:
    recorder = Recorder()
    kept = shard(recorder, staleness // 2)
    unclaimed = [(step, part) for step in range(1, steps + 1) for part in range(PARTS)]
    every = list(unclaimed)
    read: dict[tuple[int, int], int] = {}
    busy: list[tuple[int, int]] = []
    while unclaimed or busy:
        version = kept.pull(0)[0]
        may_begin = unclaimed and len(busy) < ranks and version >= unclaimed[0][0] - 1 - (staleness + 1) // 2
        assert may_begin or busy, "all ranks wait for each other"
        if may_begin and (not busy or chance.random() < 0.5):
            busy.append(unclaimed.pop(0))
            read[busy[-1]] = version
        else:
            step, part = busy.pop(chance.randrange(len(busy)))
            kept.push(step, part, read[step, part], bit(step, part))
    applied = [[key for key in every if int(total) & int(bit(*key))] for total in recorder.totals]
    assert sorted(key for keys in applied for key in keys) == every
    missed = [[update - read[key] for key in keys] for update, keys in enumerate(applied)]
    assert recorder.ages == pytest.approx([sum(each) / PARTS for each in missed])
    assert all(0 <= age <= staleness for ages in missed for age in ages)
    # What the ranks report, by the step of each part, is another attribution of the same mean.
    assert sum(map(sum, missed)) == sum(step - 1 - version for (step, _), version in read.items())
