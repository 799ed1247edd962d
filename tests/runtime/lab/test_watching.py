"""What a trial makes of a cluster that changes while it runs."""

from collections.abc import Iterator

import pytest

from paceline.runtime.domain.events import StepDone, TrialStarted
from paceline.runtime.domain.trial import Budget, TimedChange, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.server.balance import BalanceConfig
from tests.runtime.lab.support import PAIR, needs_root, write
from tests.runtime.support import RunningTrial, assert_every_sample_once, result_of, run

pytestmark = [needs_root, pytest.mark.slow]

WINDOW = BalanceConfig().window_seconds
WORKLOAD = "busy"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRuntime]:
    """A runtime on a lab of two nodes."""
    path = write(tmp_path_factory.mktemp("lab"), PAIR)
    with EmbeddedRuntime(f"lab:{path}", workload_classes=("tests.runtime.lab.hungry:Busy",)) as runtime:
        yield runtime


def spec(lab: EmbeddedRuntime, seconds: float, *timeline: TimedChange, **settings: str) -> TrialSpec:
    strategy = lab.describe_knobs().strategy({name.replace("__", "."): value for name, value in settings.items()})
    return TrialSpec(
        workload=WORKLOAD, strategy=strategy, budget=Budget(seconds=seconds), evaluations=1, timeline=timeline
    )


def test_shares_follow_a_device_once_each_way_and_no_sample_is_lost(lab: EmbeddedRuntime) -> None:
    slow, fast = 2.5 * WINDOW, 5 * WINDOW
    timeline = (
        TimedChange(change="b.speed=0.2", seconds=slow),
        TimedChange(change="b.speed=0.5", seconds=fast),
    )
    before = lab.describe_cluster()
    events = run(lab, spec(lab, 7.5 * WINDOW, *timeline, mapping__batch_share="proportional"))
    assert result_of(events).failure is None
    seconds, plans = 0.0, []
    for event in events:
        if isinstance(event, TrialStarted):
            plans.append((seconds, (0, 0)))
        elif isinstance(event, StepDone):
            seconds += event.seconds
            (first, second) = (stop - start for start, stop in event.samples)
            plans[-1] = (plans[-1][0], (first, second))
    assert_every_sample_once(events, global_batch=256, steps=result_of(events).steps)
    before_change = [shares for when, shares in plans if when < slow]
    (slowed,) = [shares for when, shares in plans if slow <= when < fast]
    (restored,) = [shares for when, shares in plans if when >= fast]
    assert len(before_change) <= 2, "at most the probe is put right"
    assert slowed[1] < before_change[-1][1]
    assert restored[1] > slowed[1]
    # The lab is as it was, and so is what is known of it.
    assert lab.describe_cluster() == before


def test_even_shares_stay_even(lab: EmbeddedRuntime) -> None:
    events = run(lab, spec(lab, 2 * WINDOW, TimedChange(change="b.speed=0.2", step=1)))
    assert sum(isinstance(event, TrialStarted) for event in events) == 1
    assert result_of(events).load_balance_error > 0.2


def test_a_link_that_got_slower_is_seen_in_the_profile(lab: EmbeddedRuntime) -> None:
    (tier,) = lab.describe_cluster().tiers
    trial = RunningTrial(lab, spec(lab, 5 * WINDOW))
    trial.wait_for(lambda event: isinstance(event, StepDone) and event.step > 8)
    seconds = 0.0

    def settled(event: object) -> bool:
        nonlocal seconds
        seconds += event.seconds if isinstance(event, StepDone) else 0.0
        return seconds > 1.5 * WINDOW

    trial.wait_for(settled)
    lab.change_cluster(["left.uplink=20 Mbit/s"])
    try:
        assert result_of(trial.wait()).failure is None
    finally:
        lab.change_cluster(["left.uplink=200 Mbit/s"])
    (found,) = lab.describe_cluster().tiers
    # Whatever crosses between the two nodes passes this link.
    assert tier.uplinks == pytest.approx((25e6, 25e6), rel=0.2)
    assert found.uplinks == pytest.approx((2.5e6, 2.5e6), rel=0.5)
