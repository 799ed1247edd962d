"""A strategy that does worse than nothing is stopped early, and is no candidate for a recommendation."""

import pytest

from paceline.runtime.domain.trial import HeldOutPoint
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.server.guard import divergence
from tests.runtime.support import result_of, run, spec_for


def curve(*losses: float, every: int = 100) -> list[HeldOutPoint]:
    return [HeldOutPoint(seconds=index, samples=index * every, loss=loss) for index, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ((5.0, 5.4), True),
        ((5.0, 4.0, 5.3), True),
        # Slow, or no worse than the noise of an evaluation.
        ((5.0, 4.9), False),
        ((5.0, 5.05), False),
        ((5.0,), False),
    ],
)
def test_worse_than_untrained_where_the_reference_has_learnt(losses: tuple[float, ...], diverged: bool) -> None:
    assert (divergence(curve(*losses), curve(5.0, 4.0, 3.0)) is not None) == diverged


def test_nothing_is_judged_before_the_reference_has_learnt_or_without_one() -> None:
    assert divergence(curve(5.0, 6.0), ()) is None
    assert divergence(curve(5.0, 6.0), curve(5.0, 4.9, 3.0)) is None
    assert divergence(curve(5.0, 6.0), curve(5.0, 3.0, every=200)) is None
    # Beyond its end the reference stays where it was.
    assert divergence(curve(5.0, 4.0, 4.0, 6.0), curve(5.0, 3.0)) is not None


def test_a_diverging_strategy_is_stopped_at_the_first_evaluation_that_shows_it(embedded: EmbeddedRuntime) -> None:
    workload = "regression/momentum"
    assert result_of(run(embedded, spec_for(embedded, {}, steps=40, workload=workload, evaluations=8))).failure is None
    # An outer step of twice the change, with momentum, overshoots further every time.
    wild = {"sync.mode": "diloco", "sync.period": 1, "sync.outer_lr": 2.0, "sync.outer_momentum": 0.99}
    result = result_of(run(embedded, spec_for(embedded, wild, steps=40, workload=workload, evaluations=8)))
    assert result.failure == "diverged"
    assert "the reference trial had reached" in result.message
    assert result.steps < 40
    assert result.steps % 5 == 0
