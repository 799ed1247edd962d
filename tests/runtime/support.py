"""What several runtime tests need."""

from collections.abc import Sequence

from torch import Tensor

from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import SnapshotTaken, StepDone, TrialEvent, TrialFailed, TrialFinished, TrialStarted
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.trial import Budget, TrialResult, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime


def spec_for(runtime: RuntimeAPI, settings: dict[str, KnobValue], *, steps: int, **fields: object) -> TrialSpec:
    """A spec of the test workload that ends with a snapshot of its last step."""
    values: dict[str, object] = {"workload": "regression", "snapshot_every": steps, **fields}
    strategy = runtime.describe_knobs().strategy(settings)
    return TrialSpec(strategy=strategy, budget=Budget(steps=steps), **values)  # type: ignore[arg-type]


def result_of(events: Sequence[TrialEvent]) -> TrialResult:
    """The result that an event stream ended with."""
    assert isinstance(events[-1], TrialFinished | TrialFailed)
    return events[-1].result


def last_snapshot(events: Sequence[TrialEvent]) -> Snapshot:
    """The last snapshot that was taken."""
    return [event for event in events if isinstance(event, SnapshotTaken)][-1].snapshot


def digests(snapshot: Snapshot, part: str) -> list[str]:
    """Content digest of a part, by rank: equal digests are equal bits."""
    return [p.digest for p in sorted(snapshot.parts, key=lambda p: p.rank) if p.name == part]


def tensors(embedded: EmbeddedRuntime, snapshot: Snapshot, part: str, rank: int = 0) -> dict[str, Tensor]:
    """Read one part of one rank back."""
    return embedded._runtime.store.get_tensors(digests(snapshot, part)[rank])


def standing_steps(events: Sequence[TrialEvent]) -> list[StepDone]:
    """The steps that count: those that no later generation took back."""
    steps: list[StepDone] = []
    for event in events:
        if isinstance(event, TrialStarted):
            steps = [step for step in steps if step.step <= event.step]
        elif isinstance(event, StepDone):
            steps.append(event)
    return steps


def assert_every_sample_once(events: Sequence[TrialEvent], *, global_batch: int, steps: int, first: int = 0) -> None:
    """The ranks' ranges tile the sample stream without gap or overlap, step by step."""
    counted = standing_steps(events)
    assert [step.step for step in counted] == list(range(first + 1, first + steps + 1))
    position = first * global_batch
    for step in counted:
        for start, stop in step.samples:
            assert start == position
            assert stop > start
            position = stop
        assert position == step.step * global_batch
