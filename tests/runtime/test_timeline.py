"""Changes of the cluster at points of a trial, read from text."""

import math

import pytest

from paceline.runtime.domain.trial import TimedChange, parse_timed_change
from paceline.runtime.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50:e0.speed=0.1", TimedChange(change="e0.speed=0.1", step=50)),
        ("20s:west.uplink=50 Mbit/s", TimedChange(change="west.uplink=50 Mbit/s", seconds=20.0)),
        ("0.5s:e0/cpu0.speed=1", TimedChange(change="e0/cpu0.speed=1", seconds=0.5)),
    ],
)
def test_text_is_read(text: str, expected: TimedChange) -> None:
    assert parse_timed_change(text) == expected


@pytest.mark.parametrize("text", ["e0.speed=0.1", "x:e0.speed=0.1", "s:e0.speed=0.1", "1.5:e0.speed=0.1", ""])
def test_text_without_a_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must begin with a step or seconds: 50:"):
        parse_timed_change(text)


@pytest.mark.parametrize("when", [{}, {"step": 1, "seconds": 1.0}])
def test_exactly_one_time_is_needed(when: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="needs either a step or seconds"):
        TimedChange(change="a.speed=1", **when)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", [{"step": 0}, {"seconds": -1.0}, {"seconds": math.inf}])
def test_impossible_times_are_refused(when: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=r"timed change 'a\.speed=1': "):
        TimedChange(change="a.speed=1", **when)  # type: ignore[arg-type]
