"""Processes that only add up what the ranks send: placement, sums, bytes, and what their loss costs."""

import pytest
import torch

from paceline.runtime import workloads
from paceline.runtime.compress import CODECS
from paceline.runtime.compress.base import BlockCodec
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import StepDone, TrialEvent, TrialStarted
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import InvalidRequest
from paceline.runtime.exchange.plan import make_reducer_plan
from paceline.runtime.knobs import config_from
from paceline.runtime.server.trial_runner import TrialRunner
from tests.runtime.support import (
    OnEvent,
    Settings,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
    tensors,
)

SPARE: Settings = {"sync.mode": "reduction_server", "mapping.reducers": "spare"}
RANKS = 2


def spec_of(embedded: EmbeddedRuntime, settings: Settings, *, steps: int = 8, **fields: object) -> TrialSpec:
    """Two ranks of the four devices, so that two are spare."""
    return spec_for(embedded, settings, steps=steps, world_size=RANKS, **fields)


def block_codecs() -> list[str]:
    return [name for name in CODECS.names() if issubclass(CODECS.get(name), BlockCodec)]


@pytest.mark.parametrize(("ranks", "reducers"), [(2, 1), (3, 2), (8, 4)])
def test_every_lane_goes_to_one_reducer_and_comes_back_to_all(ranks: int, reducers: int) -> None:
    plans = [make_reducer_plan(ranks, reducers, rank) for rank in range(ranks + reducers)]
    for index in range(2):
        sent = {(rank, t.peer, t.first, t.stop) for rank, plan in enumerate(plans) for t in plan.stages[index].sends}
        received = {
            (t.peer, rank, t.first, t.stop) for rank, plan in enumerate(plans) for t in plan.stages[index].receives
        }
        assert sent == received
        assert len(sent) == ranks * reducers
    for rank in range(ranks):
        assert [transfer.first for transfer in plans[rank].stages[0].sends] == list(range(reducers))


@pytest.mark.parametrize("reducers", ["spare", "3", "3,2"])
def test_reducers_change_nothing_but_the_order_of_summation(embedded: EmbeddedRuntime, reducers: str) -> None:
    expected = run(embedded, spec_of(embedded, {}))
    events = run(embedded, spec_of(embedded, {**SPARE, "mapping.reducers": reducers}))
    assert result_of(events).failure is None
    assert_every_sample_once(events, global_batch=13, steps=8)
    first, second = (tensors(embedded, last_snapshot(each), "model") for each in (expected, events))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", block_codecs())
def test_what_travels_equals_the_formula_and_a_restored_job_the_uninterrupted_one(
    embedded: EmbeddedRuntime, codec: str
) -> None:
    settings: dict[str, KnobValue] = {**SPARE, "compress.codec": codec}
    whole = run(embedded, spec_of(embedded, settings, steps=10, evaluations=2))
    half = run(embedded, spec_of(embedded, settings, steps=5))
    start = last_snapshot(half).snapshot_id
    rest = run(embedded, spec_of(embedded, settings, steps=5, start_snapshot=start))
    for part in ("model", "optimizer", "residuals", "rng"):
        assert digests(last_snapshot(rest), part) == digests(last_snapshot(whole), part), part
    spec = spec_of(embedded, settings)
    plugin = CODECS.get(codec)
    made = plugin(config_from(plugin.Config, spec.strategy))
    assert isinstance(made, BlockCodec)
    elements = sum(p.numel() for p in workloads.create("regression").model().parameters())
    lanes = [elements // 2, elements - elements // 2]
    pushed = sum(map(made.payload_bytes, lanes))
    returned = pushed if made.faithful else 4 * elements
    assert result_of(whole).wire_bytes == {"cluster": 10 * RANKS * (pushed + returned)}


def test_a_lost_reducer_is_replaced(embedded: EmbeddedRuntime, on_event: OnEvent) -> None:
    expected = digests(last_snapshot(run(embedded, spec_of(embedded, SPARE, workload="regression/sgd"))), "model")
    killed: list[int] = []

    def kill(runner: TrialRunner, event: TrialEvent) -> None:
        if isinstance(event, StepDone) and not killed:
            killed.append(runner.generation.reducers[0].device)
            embedded._runtime._fleet.fence(runner.generation.reducers[0])

    on_event(kill)
    events = run(embedded, spec_of(embedded, SPARE, workload="regression/sgd"))
    assert killed == [2]
    assert digests(last_snapshot(events), "model") == expected
    assert_every_sample_once(events, global_batch=13, steps=8)
    assert sum(isinstance(event, TrialStarted) for event in events) == 2


@pytest.mark.parametrize(
    ("reducers", "world_size", "message"),
    [
        (
            "spare",
            4,
            "mapping.reducers=spare needs devices that no rank runs on, and all 4 of cluster .* do; use fewer",
        ),
        ("1,2", 2, "mapping.reducers=1,2: device 1 runs a rank; free devices are 2,3$"),
        ("2,7", 2, "mapping.reducers=2,7: device 7 is not one of cluster .*; free devices are 2,3$"),
    ],
)
def test_reducers_without_a_device_of_their_own_are_refused(
    embedded: EmbeddedRuntime, reducers: str, world_size: int, message: str
) -> None:
    spec = spec_for(embedded, {**SPARE, "mapping.reducers": reducers}, steps=2, world_size=world_size)
    with pytest.raises(InvalidRequest, match=message):
        run(embedded, spec)


def test_the_same_workers_may_all_train_next(embedded: EmbeddedRuntime) -> None:
    expected = digests(last_snapshot(run(embedded, spec_for(embedded, {}, steps=3))), "model")
    for ranks, settings in ((2, SPARE), (4, {}), (3, SPARE), (4, {})):
        events = run(embedded, spec_for(embedded, settings, steps=3, world_size=ranks))
        assert result_of(events).failure is None
    assert digests(last_snapshot(events), "model") == expected
