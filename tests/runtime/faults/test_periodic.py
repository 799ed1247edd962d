"""Ranks lost while replicas are not alike: between sync points, with averagings under way, with layers that wait."""

import pytest

from paceline.runtime import mapping
from paceline.runtime.domain.events import TrialStarted
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.mapping.levels import Level
from tests.runtime.faults.support import PHASES, Inject, workers_started
from tests.runtime.support import Settings, assert_every_sample_once, digests, last_snapshot, result_of, run, spec_for

STREAMED: Settings = {"sync.period": 4, "sync.fragments": 2, "sync.delay": 2}
DENSE: Settings = {"sync.period": 4, "sync.fragments": 4, "sync.delay": 3, "sync.mode": "diloco"}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("step", "restored"), [(3, 0), (7, 4)], ids=["seed", "snapshot"])
@pytest.mark.parametrize("settings", [STREAMED, DENSE, {**STREAMED, "compress.codec": "powersgd"}])
def test_replicas_that_are_never_equal_go_back_to_where_each_has_its_own_state(
    embedded: EmbeddedRuntime, inject: Inject, settings: Settings, step: int, restored: int, phase: str
) -> None:
    settings = {"sync.mode": "local_sgd", **settings}
    spec = spec_for(embedded, settings, steps=8, workload="regression/momentum", snapshot_every=4)
    expected, before = run(embedded, spec), workers_started(embedded)
    inject(step=step, position=5, phase=phase)
    events = run(embedded, spec)
    assert result_of(events).failure is None
    assert workers_started(embedded) == before + 1
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, restored]
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=8)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("position", [0, 12], ids=["first rack", "second rack"])
def test_rank_of_a_rack_that_trains_synchronously(
    embedded: EmbeddedRuntime, inject: Inject, monkeypatch: pytest.MonkeyPatch, position: int, phase: str
) -> None:
    monkeypatch.setattr(mapping, "tier_levels", lambda *_: (Level(name="rack", groups=(0, 0, 1, 1)),))
    settings: Settings = {"sync.mode": "local_sgd", "sync.period": 3, "sync.inner": "tier"}
    spec = spec_for(embedded, settings, steps=7, workload="regression/sgd")
    expected = run(embedded, spec)
    inject(step=5, position=position, phase=phase)
    events = run(embedded, spec)
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, 3]
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=7)


@pytest.mark.parametrize("phase", PHASES)
def test_rank_whose_layers_wait_for_their_exchange(embedded: EmbeddedRuntime, inject: Inject, phase: str) -> None:
    spec = spec_for(embedded, {"sync.layer_periods": "1,4"}, steps=7, workload="regression/sgd")
    inject(step=6, position=5, phase=phase)
    events = run(embedded, spec)
    # Whose optimizer steps has every gradient of the step already.
    restored = 6 if phase == "optimizer" else 5
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, restored]
    assert len(set(digests(last_snapshot(events), "model"))) == 1
    assert_every_sample_once(events, global_batch=13, steps=7)
