"""Layers that are exchanged at different frequencies while gradients are averaged."""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.runtime import workloads
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.samples import SampleStream
from tests.runtime.support import (
    OnEvent,
    Settings,
    Switching,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    spec_for,
    standing_steps,
    tensors,
)
from tests.runtime.test_sync_conformance import assert_restores

PERIODS = {"0.weight": 1, "0.bias": 3, "4.weight": 3, "4.bias": 3}
"""Of `1,3`, which cuts the 74 elements of the model after the first 48."""
LAYERED: Settings = {"sync.layer_periods": "1,3"}
MODES = ("allreduce", "hierarchical")


def reference(steps: int, changes: dict[int, dict[str, int]]) -> dict[str, Tensor]:
    """One process on the whole batch; after the steps in `changes` layers have other periods."""
    workload = workloads.create("regression/momentum")
    torch.manual_seed(int(np.random.SeedSequence((0,)).generate_state(1, np.uint64)[0]))
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    stream = SampleStream(workload.train_samples, 0)
    waiting = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    periods = dict(PERIODS)
    for step in range(1, steps + 1):
        loss = workload.loss(model, workload.batch(stream.indices((step - 1) * 13, step * 13)))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            waiting[name] += gradient / periods[name]
            parameter.grad = None
            if step % periods[name] == 0:
                parameter.grad, waiting[name] = waiting[name], torch.zeros_like(parameter)
        optimizer.step()
        periods = changes.get(step, periods)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(trained: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bucket_mb", [25.0, 0.25])
@pytest.mark.parametrize("mode", MODES)
def test_layer_is_stepped_by_the_mean_of_its_gradients(embedded: EmbeddedRuntime, mode: str, bucket_mb: float) -> None:
    settings = {"sync.mode": mode, "mapping.batch_share": "5,1,2,1", "sync.bucket_mb": bucket_mb, **LAYERED}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=10, workload="regression/momentum")))
    assert result_of(events).failure is None
    assert_every_sample_once(events, global_batch=13, steps=10)
    assert len(set(digests(last_snapshot(events), "model"))) == 1
    assert_close(tensors(embedded, last_snapshot(events), "model"), reference(10, {}))


def test_only_layers_that_are_due_travel(embedded: EmbeddedRuntime) -> None:
    steps = standing_steps(list(embedded.run_trial(spec_for(embedded, LAYERED, steps=6))))
    elements = [48, 48, 74, 48, 48, 74]
    assert [step.wire_bytes for step in steps] == [{"cluster": 2 * 3 * 4 * count} for count in elements]


@pytest.mark.parametrize("codec", ["none", "topk"])
@pytest.mark.parametrize("mode", MODES)
def test_restored_job_equals_the_uninterrupted_one_bit_for_bit(
    embedded: EmbeddedRuntime, mode: str, codec: str
) -> None:
    assert_restores(embedded, {"sync.mode": mode, "compress.codec": codec, **LAYERED})


@pytest.mark.parametrize(
    ("after", "periods"),
    [
        ({"sync.layer_periods": "1,2"}, {"0.weight": 1, "0.bias": 2, "4.weight": 2, "4.bias": 2}),
        ({}, dict.fromkeys(PERIODS, 1)),
        ({"sync.mode": "hierarchical"}, dict.fromkeys(PERIODS, 1)),
        ({**LAYERED, "sync.mode": "hierarchical"}, PERIODS),
        ({**LAYERED, "mapping.order": "3,1,0,2"}, PERIODS),
        ({**LAYERED, "precision.compute": "fp32", "compress.codec": "none"}, PERIODS),
    ],
)
def test_what_waits_at_a_switch_is_exchanged_after_it(
    embedded: EmbeddedRuntime, on_event: OnEvent, after: Settings, periods: dict[str, int]
) -> None:
    spec = spec_for(embedded, LAYERED, steps=8, workload="regression/momentum", evaluations=8)
    events = Switching(embedded, on_event).run(spec, {5: after})
    assert_close(tensors(embedded, last_snapshot(events), "model"), reference(8, {5: periods}))


def test_what_waits_when_parameters_are_to_be_averaged_is_in_the_first_local_gradient(
    embedded: EmbeddedRuntime, on_event: OnEvent
) -> None:
    local: Settings = {"sync.mode": "local_sgd", "sync.period": 1, "mapping.batch_share": "5,1,2,1"}
    before: Settings = {**LAYERED, "mapping.batch_share": "5,1,2,1"}
    spec = spec_for(embedded, before, steps=6, workload="regression/momentum", evaluations=6)
    events = Switching(embedded, on_event).run(spec, {5: local})
    assert_close(tensors(embedded, last_snapshot(events), "model"), reference(6, {5: dict.fromkeys(PERIODS, 1)}))
