"""Trials in a lab: the same results as anywhere, whatever happens to the cluster meanwhile."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from paceline.runtime.domain.events import StepDone, TrialStarted
from paceline.runtime.domain.trial import TimedChange
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.server import trial_runner
from tests.runtime.conftest import WORKLOADS
from tests.runtime.lab.support import PAIR, inventory, needs_root, write
from tests.runtime.support import RunningTrial, digests, last_snapshot, result_of, run, spec_for

pytestmark = [needs_root, pytest.mark.slow]

STEPS = 30


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, fault_file: Path) -> Iterator[EmbeddedRuntime]:
    """A runtime on a lab of two nodes."""
    before = inventory()
    path = write(tmp_path_factory.mktemp("lab"), PAIR)
    store = tmp_path_factory.mktemp("snapshots")
    classes = (*WORKLOADS, "tests.runtime.lab.hungry:Hungry")
    with EmbeddedRuntime(f"lab:{path}", store_url=str(store), workload_classes=classes) as runtime:
        yield runtime
    assert inventory() == before


@pytest.fixture(scope="module")
def expected(embedded: EmbeddedRuntime) -> list[str]:
    """The model that two ranks of `local` train, bit by bit."""
    spec = spec_for(embedded, {}, steps=STEPS, world_size=2)
    return digests(last_snapshot(run(embedded, spec)), "model")


def workers(lab: EmbeddedRuntime, node: str) -> list[psutil.Process]:
    """The processes on a node."""
    launcher = lab._runtime.launcher
    files = launcher._lab.members_files(f"{node}/cpu0")  # type: ignore[attr-defined]
    return [psutil.Process(int(pid)) for pid in Path(files[0]).read_text().split()]


def test_trial_trains_what_local_trains(lab: EmbeddedRuntime, expected: list[str]) -> None:
    events = run(lab, spec_for(lab, {}, steps=STEPS))
    assert result_of(events).failure is None
    assert digests(last_snapshot(events), "model") == expected


@pytest.mark.parametrize(
    "timeline",
    [
        [TimedChange(change="b.state=killed", step=5)],
        [TimedChange(change="b.network=cut", step=5), TimedChange(change="b.network=up", seconds=2.0)],
        [TimedChange(change="left.network=cut", step=5), TimedChange(change="left.network=up", seconds=2.0)],
        [TimedChange(change="b.state=frozen", step=5), TimedChange(change="b.state=running", seconds=2.0)],
        [TimedChange(change="a.link=10 Mbit/s", step=5), TimedChange(change="a.speed=0.2", step=9)],
    ],
    ids=lambda timeline: timeline[0].change,
)
def test_trial_is_the_same_whatever_happens_to_the_cluster(
    lab: EmbeddedRuntime, expected: list[str], timeline: Sequence[TimedChange]
) -> None:
    events = run(lab, spec_for(lab, {}, steps=STEPS, timeline=tuple(timeline)))
    assert result_of(events).failure is None
    assert digests(last_snapshot(events), "model") == expected
    killed = "killed" in timeline[0].change
    assert sum(isinstance(event, TrialStarted) for event in events) == 1 + killed


def test_node_that_stays_cut_off_ends_the_trial_and_the_next_one_works(
    lab: EmbeddedRuntime, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_runner, "STALL_SECONDS", 3.0)
    cut = TimedChange(change="b.network=cut", step=5)
    assert result_of(run(lab, spec_for(lab, {}, steps=STEPS, timeline=(cut,)))).failure == "timeout"
    assert digests(last_snapshot(run(lab, spec_for(lab, {}, steps=STEPS))), "model") == expected


def test_node_is_frozen_and_goes_on_by_command(lab: EmbeddedRuntime, expected: list[str]) -> None:
    trial = RunningTrial(lab, spec_for(lab, {}, steps=STEPS))
    trial.wait_for(lambda event: isinstance(event, StepDone))
    lab.change_cluster(["a.state=frozen"])
    (worker,) = workers(lab, "a")
    while worker.status() != psutil.STATUS_STOPPED:
        assert worker.is_running()
    lab.change_cluster(["a.state=running"])
    assert digests(last_snapshot(trial.wait()), "model") == expected
    assert workers(lab, "a") == [worker]


def test_out_of_memory_is_labelled_and_the_next_trial_works(lab: EmbeddedRuntime, expected: list[str]) -> None:
    result = result_of(run(lab, spec_for(lab, {}, steps=3, workload="hungry")))
    assert result.failure == "oom"
    assert digests(last_snapshot(run(lab, spec_for(lab, {}, steps=STEPS))), "model") == expected


def test_strategy_that_needs_too_much_memory_is_labelled_and_the_next_trial_works(tmp_path: Path) -> None:
    """Plain DDP fits; what local SGD and a sparsifying codec keep besides does not."""
    path = write(tmp_path, PAIR.replace("512 MiB", "400 MiB").replace("400 Mbit/s", "1 Gbit/s").replace("200", "800"))
    too_much = {"sync.mode": "local_sgd", "sync.period": 1, "compress.codec": "topk", "compress.ratio": 0.5}
    with EmbeddedRuntime(f"lab:{path}", workload_classes=("tests.runtime.lab.hungry:Heavy",)) as runtime:
        for settings, label in (({}, None), (too_much, "oom"), ({}, None)):
            spec = spec_for(runtime, settings, steps=2, workload="heavy", snapshot_every=0)
            assert result_of(run(runtime, spec)).failure == label


def test_change_that_cannot_be_made_is_refused_before_the_trial(lab: EmbeddedRuntime) -> None:
    timeline = (TimedChange(change="d.state=killed", step=1),)
    with pytest.raises(UnknownName, match="unknown node, rack or device 'd'"):
        run(lab, spec_for(lab, {}, steps=1, timeline=timeline))
    with pytest.raises(InvalidRequest, match="write TARGET"):
        lab.change_cluster(["a.link=10 Mbit/s", "b"])


def test_local_cannot_be_changed(embedded: EmbeddedRuntime) -> None:
    with pytest.raises(InvalidRequest, match="only a lab can be changed"):
        embedded.change_cluster(["localhost.speed=0.1"])
