"""Switching the strategy of a running trial: which switches there are, and what each keeps."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.runtime import workloads
from paceline.runtime.api import RuntimeAPI
from paceline.runtime.compress import CODECS
from paceline.runtime.domain.events import SnapshotTaken, StepDone, TrialEvent, TrialStarted
from paceline.runtime.domain.snapshot import Snapshot
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Conflict, InvalidRequest, NotFound
from paceline.runtime.samples import SampleStream
from paceline.runtime.sync import SYNC_MODES
from tests.runtime.support import (
    OnEvent,
    RunningTrial,
    Settings,
    Switching,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
    standing_steps,
    tensors,
)

CHAIN: list[Settings] = [
    {"compress.codec": "topk"},
    {"compress.codec": "topk", "compress.ratio": 0.5},
    {"compress.codec": "topk", "compress.error_feedback": False},
    {"sync.mode": "local_sgd"},
    {"sync.mode": "local_sgd", "sync.period": 3, "compress.codec": "topk"},
    {"sync.mode": "local_sgd", "sync.period": 3, "mapping.order": "1,2,3,0"},
    {"sync.mode": "local_sgd", "sync.period": 3, "mapping.batch_share": "5,1,2,1"},
    {"sync.mode": "local_sgd", "sync.bucket_mb": 0.25},
    {"sync.mode": "local_sgd", "sync.period": 4, "sync.fragments": 2, "sync.delay": 2, "compress.codec": "topk"},
    {"sync.mode": "local_sgd", "sync.period": 2, "sync.layer_periods": "1,2", "sync.inner": "tier"},
    {"sync.mode": "local_sgd", "sync.period": 2},
    {"sync.mode": "local_sgd", "sync.period": 3, "sync.inner": "tier", "mapping.batch_share": "5,1,2,1"},
    {"sync.mode": "diloco", "sync.period": 4, "sync.fragments": 4, "sync.delay": 3},
    {"sync.mode": "diloco", "sync.period": 4, "sync.fragments": 4, "sync.delay": 3, "compress.codec": "topk"},
    {"sync.mode": "diloco", "sync.period": 2},
    {"sync.layer_periods": "1,4"},
    {"sync.layer_periods": "4,1", "compress.codec": "topk"},
    {"sync.mode": "hierarchical", "sync.layer_periods": "1,2"},
    {"sync.mode": "diloco", "sync.inner": "tier"},
    {"mapping.order": "3,1,0,2"},
    {"mapping.batch_share": "5,1,2,1"},
    {"precision.compute": "bf16"},
    {"sync.bucket_mb": 0.25},
    {
        "precision.compute": "bf16",
        "compress.codec": "fp16",
        "mapping.order": "3,2,1,0",
        "mapping.batch_share": "1,1,1,9",
    },
    {},
]
FOREVER = 10**9


def tour(names: Sequence[str]) -> list[str]:
    """An order in which each name follows each, itself too, exactly once: a de Bruijn sequence, from Lyndon words."""
    order = []
    for index, name in enumerate(names):
        order.append(name)
        order.extend(each for later in names[index + 1 :] for each in (name, later))
    return [*order, order[0]]


def every_pair() -> list[Settings]:
    """Settings in an order in which every sync mode follows every sync mode, and every codec every codec."""
    topk: Settings = {"compress.codec": "topk", "compress.ratio": 0.5}
    modes: list[Settings] = [{"sync.mode": mode, **topk} for mode in tour(SYNC_MODES.names())]
    codecs: list[Settings] = [{"compress.codec": codec} for codec in tour(CODECS.names())]
    return [*modes, *codecs]


@pytest.mark.parametrize("chain", [CHAIN, every_pair()], ids=["chain", "every pair"])
def test_switch_after_switch_skips_no_sample_and_leaves_equal_replicas(
    embedded: EmbeddedRuntime, on_event: OnEvent, chain: list[Settings]
) -> None:
    stops = len(chain) + 1
    spec = spec_for(embedded, {}, steps=2 * stops, workload="regression/momentum", evaluations=stops)
    switching = Switching(embedded, on_event)
    events = switching.run(spec, {2 * index: settings for index, settings in enumerate(chain, start=1)})
    result = result_of(events)
    assert result.failure is None
    started = [event for event in events if isinstance(event, TrialStarted)]
    strategies = [embedded.describe_knobs().strategy(settings) for settings in chain]
    assert [event.strategy for event in started[1:]] == strategies
    assert [event.step for event in started] == [2 * index for index in range(stops)]
    assert [event.generation for event in started[1:]] == switching.answers
    assert sorted({event.generation for event in started}) == [event.generation for event in started]
    assert (result.generations, result.strategy) == (stops, strategies[-1])
    assert_every_sample_once(events, global_batch=13, steps=2 * stops)
    assert len(set(digests(last_snapshot(events), "model"))) == 1
    for step in standing_steps(events):
        assert step.generation == started[(step.step - 1) // 2].generation


@pytest.mark.parametrize("settings", CHAIN)
def test_client_switches_a_running_trial(runtime: RuntimeAPI, embedded: EmbeddedRuntime, settings: Settings) -> None:
    before = embedded._runtime._fleet._incarnations
    spec = TrialSpec(workload="regression", strategy=runtime.describe_knobs().default, budget=Budget(steps=FOREVER))
    trial = RunningTrial(runtime, spec)
    strategy = runtime.describe_knobs().strategy(settings)
    generation = runtime.update_strategy(trial.trial_id, strategy)
    trial.wait_for_steps(generation)
    snapshot = runtime.snapshot(trial.trial_id)
    runtime.cancel_trial(trial.trial_id)
    events = trial.wait()
    assert (result_of(events).failure, result_of(events).strategy) == ("cancelled", strategy)
    assert Strategy.of(snapshot.strategy) == strategy
    assert {numbers["steps_done"] for numbers in numbers_of(embedded, snapshot)} == {snapshot.step}
    done = len(standing_steps(events))
    assert done >= snapshot.step
    assert_every_sample_once(events, global_batch=13, steps=done)
    assert embedded._runtime._fleet._incarnations == before


def numbers_of(embedded: EmbeddedRuntime, snapshot: Snapshot) -> list[dict[str, object]]:
    return [embedded._runtime.store.get_json(digest) for digest in digests(snapshot, "numbers")]


def test_same_request_switches_once(runtime: RuntimeAPI) -> None:
    space = runtime.describe_knobs()
    trial = RunningTrial(
        runtime, TrialSpec(workload="regression", strategy=space.default, budget=Budget(steps=FOREVER))
    )
    request_id = f"switch of {trial.trial_id}"
    first = runtime.update_strategy(trial.trial_id, space.strategy({"compress.codec": "bf16"}), request_id=request_id)
    trial.wait_for_steps(first)
    again = runtime.update_strategy(trial.trial_id, space.strategy({"compress.codec": "bf16"}), request_id=request_id)
    runtime.cancel_trial(trial.trial_id)
    assert again == first
    assert result_of(trial.wait()).generations == 2


ILLEGAL: list[tuple[Settings, str]] = [
    (
        {"compress.codec": "topkk"},
        f"compress.codec=topkk: must be one of {', '.join(CODECS.names())}; did you mean 'topk'?",
    ),
    (
        {"compress.codec": "topk", "compress.ratio": 0.9},
        "compress.ratio=0.9: must be a number from 0.001 to 0.5; nearest legal: 0.5",
    ),
    (
        {"sync.period": 4},
        "sync.period=4 has no effect with sync.mode=allreduce; set sync.mode=diloco, or leave sync.period at "
        "its default 8",
    ),
    (
        {"mapping.order": "0,1,2"},
        "mapping.order=0,1,2: must be scheduler, topology or a permutation of 0..n-1, n = 4; for example 0,1,2,3",
    ),
    (
        {"mapping.batch_share": "100,1,1,1"},
        "mapping.batch_share=100,1,1,1 leaves rank 1 without a sample of a global batch of 13; give it a larger weight",
    ),
    ({"compress.kodec": "topk"}, "unknown knob 'compress.kodec'; did you mean 'compress.codec'?"),
]


def test_illegal_switches_are_refused_by_name_and_change_nothing(runtime: RuntimeAPI) -> None:
    default = runtime.describe_knobs().default
    spec = spec_for(runtime, {}, steps=150)
    expected = digests(last_snapshot(run(runtime, spec)), "model")
    trial = RunningTrial(runtime, spec)
    trial.wait_for(lambda event: isinstance(event, StepDone))
    for settings, message in ILLEGAL:
        with pytest.raises(InvalidRequest) as refused:
            runtime.update_strategy(trial.trial_id, Strategy.of({**default, **settings}))
        assert str(refused.value) == message
    assert runtime.get_trial(trial.trial_id).state == "running"
    events = trial.wait()
    assert (result_of(events).generations, result_of(events).strategy) == (1, default)
    assert digests(last_snapshot(events), "model") == expected


def test_switch_of_a_trial_that_does_not_run_is_refused(runtime: RuntimeAPI) -> None:
    default = runtime.describe_knobs().default
    events = run(runtime, spec_for(runtime, {}, steps=2))
    ended = next(event.trial_id for event in events if isinstance(event, TrialStarted))
    with pytest.raises(Conflict, match=f"^trial {ended} is finished, not running$"):
        runtime.update_strategy(ended, default)
    with pytest.raises(NotFound, match=r"^no trial 'nothing' on this runtime; list_trials names [0-9]+$"):
        runtime.update_strategy("nothing", default)


def gradient_at(weights: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Mean gradient over the samples at these positions of the stream."""
    workload = workloads.create("regression/sgd")
    model = workload.model()
    model.load_state_dict(weights)
    indices = SampleStream(workload.train_samples, seed=0).indices(start, stop)
    workload.loss(model, workload.batch(indices)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def snapshots_of(events: Sequence[TrialEvent]) -> dict[int, Snapshot]:
    """By step."""
    return {event.snapshot.step: event.snapshot for event in events if isinstance(event, SnapshotTaken)}


def mean(values: Sequence[dict[str, Tensor]], name: str) -> Tensor:
    """Mean over ranks."""
    return torch.stack([value[name] for value in values]).mean(dim=0)


LEARNING_RATE = 0.05
ONE: Settings = {"sync.mode": "local_sgd", "sync.period": 1}


@pytest.mark.parametrize(
    ("before", "after", "unit"),
    [
        # All-reduce exchanges gradients, local SGD changes of parameters; residuals are in the same unit.
        ({}, {}, LEARNING_RATE),
        ({}, {"sync.bucket_mb": 0.25}, LEARNING_RATE),
        ({}, {"mapping.order": "3,1,0,2"}, LEARNING_RATE),
        ({}, {"mapping.batch_share": "5,1,2,1"}, LEARNING_RATE),
        (ONE, ONE, 1.0),
        (ONE, {**ONE, "sync.bucket_mb": 0.25}, 1.0),
        ({}, {"sync.mode": "hierarchical"}, LEARNING_RATE),
        ({}, ONE, LEARNING_RATE),
        ({}, {**ONE, "sync.inner": "tier"}, LEARNING_RATE),
        (ONE, {}, 1.0),
        (ONE, {**ONE, "sync.mode": "diloco", "sync.outer_lr": 1.0, "sync.outer_momentum": 0.0}, 1.0),
    ],
)
def test_what_topk_left_unsent_arrives_after_the_switch(
    embedded: EmbeddedRuntime, on_event: OnEvent, before: Settings, after: Settings, unit: float
) -> None:
    settings = {**before, "compress.codec": "topk"}
    spec = spec_for(embedded, settings, steps=6, workload="regression/sgd", snapshot_every=1, evaluations=6)
    snapshots = snapshots_of(Switching(embedded, on_event).run(spec, {5: after}))
    weights, trained = (tensors(embedded, snapshots[step], "model") for step in (5, 6))
    residuals = [tensors(embedded, snapshots[5], "residuals", rank) for rank in range(4)]
    unsent = {name: mean(residuals, name).view_as(weight) for name, weight in weights.items()}
    # Unsent changes are made before a mode that averages gradients takes over; all else arrives with the next exchange.
    made = unit if (before, after) == (ONE, {}) else 0.0
    gradient = gradient_at({name: weight - made * unsent[name] for name, weight in weights.items()}, 5 * 13, 6 * 13)
    for name, weight in weights.items():
        assert unsent[name].abs().max() > 1e-3
        expected = weight - LEARNING_RATE * gradient[name] - unit * unsent[name]
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)
    assert [tensors(embedded, snapshots[6], "residuals", rank) for rank in range(4)] == [{}] * 4


def test_residual_waits_for_the_next_exchange_over_several_switches(
    embedded: EmbeddedRuntime, on_event: OnEvent
) -> None:
    local: Settings = {"sync.mode": "local_sgd", "sync.period": 3}
    topk: Settings = {**local, "compress.codec": "topk"}
    spec = spec_for(embedded, topk, steps=6, workload="regression/sgd", snapshot_every=1, evaluations=6)
    schedule = {3: {**local, "compress.codec": "bf16"}, 4: {**local, "sync.bucket_mb": 0.25}, 5: local}
    snapshots = snapshots_of(Switching(embedded, on_event).run(spec, schedule))
    anchor, trained = (tensors(embedded, snapshots[step], "model") for step in (3, 6))
    residuals = [tensors(embedded, snapshots[3], "residuals", rank) for rank in range(4)]
    shares, start, change = (4, 3, 3, 3), 5 * 13, {name: torch.zeros_like(weight) for name, weight in anchor.items()}
    for rank, share in enumerate(shares):
        kept = tensors(embedded, snapshots[5], "residuals", rank)
        assert {name: kept[name].tolist() for name in anchor} == {
            name: residuals[rank][name].tolist() for name in anchor
        }
        weights = tensors(embedded, snapshots[5], "model", rank)
        gradient = gradient_at(weights, start, start + share)
        start += share
        for name in anchor:
            change[name] += share / 13 * (anchor[name] - weights[name] + LEARNING_RATE * gradient[name])
    for name, weight in anchor.items():
        expected = weight - change[name] - mean(residuals, name).view_as(weight)
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)


def test_drifted_replicas_are_averaged_when_the_mode_changes(embedded: EmbeddedRuntime, on_event: OnEvent) -> None:
    local: Settings = {"sync.mode": "local_sgd", "sync.period": 64}
    spec = spec_for(embedded, local, steps=6, workload="regression/momentum", snapshot_every=1, evaluations=6)
    snapshots = snapshots_of(Switching(embedded, on_event).run(spec, {5: {}}))
    own = [tensors(embedded, snapshots[5], "model", rank) for rank in range(4)]
    moments = [tensors(embedded, snapshots[5], "optimizer", rank) for rank in range(4)]
    trained = tensors(embedded, snapshots[6], "model")
    gradient = gradient_at({name: mean(own, name) for name in own[0]}, 5 * 13, 6 * 13)
    for index, name in enumerate(gradient):
        assert not torch.equal(own[0][name], own[1][name])
        moment = 0.9 * mean(moments, f"{index}.momentum_buffer") + gradient[name]
        torch.testing.assert_close(trained[name], mean(own, name) - LEARNING_RATE * moment, rtol=1e-4, atol=1e-5)


def test_request_id_of_another_request_is_refused(runtime: RuntimeAPI) -> None:
    space = runtime.describe_knobs()
    trial = RunningTrial(
        runtime, TrialSpec(workload="regression", strategy=space.default, budget=Budget(steps=FOREVER))
    )
    request_id = f"used by {trial.trial_id}"
    generation = runtime.update_strategy(
        trial.trial_id, space.strategy({"compress.codec": "bf16"}), request_id=request_id
    )
    refused = f"^request id '{request_id}' was used for another request; choose a new one$"
    with pytest.raises(Conflict, match=refused):
        runtime.snapshot(trial.trial_id, request_id=request_id)
    with pytest.raises(Conflict, match=refused):
        runtime.update_strategy(trial.trial_id, space.strategy({"compress.codec": "fp16"}), request_id=request_id)
    assert runtime.get_trial(trial.trial_id).generation == generation
    runtime.cancel_trial(trial.trial_id)
    assert result_of(trial.wait()).generations == 2
