"""Every sync mode and codec, over the registries: right gradients, equal replicas, exact restore, bytes as computed."""

import math

import numpy as np
import pytest
import torch

from paceline.runtime import workloads
from paceline.runtime.compress import CODECS
from paceline.runtime.compress.base import BlockCodec, Codec
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import SnapshotTaken
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.knobs import config_from, knob_space
from paceline.runtime.precision import RECIPES
from paceline.runtime.samples import SampleStream
from paceline.runtime.sync import SYNC_MODES
from tests.runtime.support import assert_every_sample_once, digests, last_snapshot, result_of, spec_for, tensors

MODES = SYNC_MODES.names()
EXACT: dict[str, dict[str, KnobValue]] = {"async": {"sync.staleness": 0}}
"""What a mode needs so that the same run has the same bits every time."""
TELLING: dict[str, dict[str, KnobValue]] = {"powersgd": {"compress.rank": 1}}
"""What a codec needs so that it makes a tiny model's gradients smaller."""
PAIRS = [
    (mode, codec)
    for mode in MODES
    for codec in CODECS.names()
    if knob_space().is_legal({"sync.mode": mode, "compress.codec": codec})
]
GROUPED: dict[str, KnobValue] = {"sync.mode": "hierarchical", "mapping.groups": "1,2,2,2"}


def settings_of(mode: str, codec: str) -> dict[str, KnobValue]:
    """A mode and a codec as they are tested together."""
    return {"sync.mode": mode, "compress.codec": codec, **EXACT.get(mode, {}), **TELLING.get(codec, {})}


def codec_of(spec: TrialSpec) -> Codec:
    """The codec of a trial."""
    plugin = CODECS.get(str(spec.strategy["compress.codec"]))
    return plugin(config_from(plugin.Config, spec.strategy))


def one_process_reference(reference: str, *, steps: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Train on the same samples without any distribution."""
    workload = workloads.create(reference)
    torch.manual_seed(int(np.random.SeedSequence((seed,)).generate_state(1, np.uint64)[0]))
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    stream = SampleStream(workload.train_samples, seed)
    for step in range(steps):
        indices = stream.indices(step * workload.global_batch, (step + 1) * workload.global_batch)
        optimizer.zero_grad()
        workload.loss(model, workload.batch(indices)).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", ["even", "5,1,2,1"])
def test_all_ranks_end_with_equal_weights(embedded: EmbeddedRuntime, mode: str, share: str) -> None:
    settings: dict[str, KnobValue] = {"sync.mode": mode, "mapping.batch_share": share}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=11, workload="regression/momentum")))
    assert result_of(events).failure is None
    assert len(set(digests(last_snapshot(events), "model"))) == 1
    assert_every_sample_once(events, global_batch=13, steps=11)


# The CNN gets one step: where a ReLU's input is 0, the order of summation decides on which side of the kink it lies.
@pytest.mark.parametrize(("reference", "steps"), [("regression/momentum", 8), ("digits-cnn", 1), ("bytes-lm/tiny", 8)])
@pytest.mark.parametrize("share", ["even", "5,1,2,1"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if SYNC_MODES.get(mode).replicas_equal])
def test_exact_modes_equal_one_process(
    embedded: EmbeddedRuntime, mode: str, share: str, reference: str, steps: int
) -> None:
    settings: dict[str, KnobValue] = {"sync.mode": mode, "mapping.batch_share": share}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=steps, workload=reference)))
    trained = tensors(embedded, last_snapshot(events), "model")
    start, expected = (one_process_reference(reference, steps=count) for count in (0, steps))
    for name in expected:
        error = torch.linalg.vector_norm(trained[name] - expected[name])
        change = torch.linalg.vector_norm(expected[name] - start[name])
        assert error <= 1e-4 * change, name


def test_groups_change_nothing_but_the_order_of_summation(embedded: EmbeddedRuntime) -> None:
    events = list(embedded.run_trial(spec_for(embedded, GROUPED, steps=8)))
    trained = tensors(embedded, last_snapshot(events), "model")
    for name, expected in one_process_reference("regression", steps=8).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", ["all", "slow"])
def test_restored_job_of_groups_equals_the_uninterrupted_one(embedded: EmbeddedRuntime, tier: str) -> None:
    assert_restores(embedded, {**GROUPED, "compress.codec": "topk", "compress.tier": tier})


@pytest.mark.parametrize("reference", ["regression/momentum", "bytes-lm/tiny"])
def test_async_without_staleness_equals_one_process(embedded: EmbeddedRuntime, reference: str) -> None:
    settings: dict[str, KnobValue] = {"sync.mode": "async", "sync.staleness": 0}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=8, workload=reference)))
    trained = tensors(embedded, last_snapshot(events), "model")
    start, expected = (one_process_reference(reference, steps=count) for count in (0, 8))
    for name in expected:
        error = torch.linalg.vector_norm(trained[name] - expected[name])
        assert error <= 1e-4 * torch.linalg.vector_norm(expected[name] - start[name]), name


def test_local_sgd_with_period_one_is_synchronous_sgd(embedded: EmbeddedRuntime) -> None:
    settings: dict[str, KnobValue] = {"sync.mode": "local_sgd", "sync.period": 1, "mapping.batch_share": "5,1,2,1"}
    events = list(embedded.run_trial(spec_for(embedded, settings, steps=8)))
    trained = tensors(embedded, last_snapshot(events), "model")
    for name, expected in one_process_reference("regression", steps=8).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_buffers_stay_together(embedded: EmbeddedRuntime, mode: str) -> None:
    spec = spec_for(embedded, {"sync.mode": mode}, steps=11, workload="regression/norm")
    events = list(embedded.run_trial(spec))
    assert result_of(events).failure is None
    assert len(set(digests(last_snapshot(events), "model"))) == 1


@pytest.mark.parametrize(("mode", "codec"), PAIRS)
def test_restored_job_equals_the_uninterrupted_one_bit_for_bit(
    embedded: EmbeddedRuntime, mode: str, codec: str
) -> None:
    assert_restores(embedded, settings_of(mode, codec))


def assert_restores(embedded: EmbeddedRuntime, settings: dict[str, KnobValue]) -> None:
    """Twenty steps equal ten, a snapshot, and ten from there, in every bit of the state."""
    whole = list(embedded.run_trial(spec_for(embedded, settings, steps=20, workload="regression/dropout")))
    half = spec_for(embedded, settings, steps=20, workload="regression/dropout", snapshot_every=10)
    middle = next(event.snapshot for event in embedded.run_trial(half) if isinstance(event, SnapshotTaken))
    assert middle.step == 10
    rest = spec_for(embedded, settings, steps=10, workload="regression/dropout", start_snapshot=middle.snapshot_id)
    second = list(embedded.run_trial(rest))
    for part in ("model", "optimizer", "sync", "residuals", "codec", "rng", "numbers"):
        assert digests(last_snapshot(second), part) == digests(last_snapshot(whole), part), part
    assert_every_sample_once(second, global_batch=13, steps=10, first=10)


@pytest.mark.parametrize(("mode", "codec"), PAIRS)
def test_bytes_on_the_wire_equal_the_formula(embedded: EmbeddedRuntime, mode: str, codec: str) -> None:
    spec: TrialSpec = spec_for(embedded, settings_of(mode, codec), steps=16)
    events = list(embedded.run_trial(spec))
    shapes = [p.shape for p in workloads.create("regression").model().parameters()]
    parameters = sum(shape.numel() for shape in shapes)
    codec, ranks = codec_of(spec), 4
    once = 2 * (ranks - 1) * codec.bucket_bytes(shapes)
    if mode == "async":
        assert isinstance(codec, BlockCodec)
        # Four tensors are four shards; every other rank pushes a gradient to each and pulls its parameters.
        once = (ranks - 1) * sum(codec.payload_bytes(shape.numel()) + 4 * shape.numel() for shape in shapes)
    elif isinstance(codec, BlockCodec) and (mode in ("hierarchical", "reduction_server") or codec.sums_at_owners):
        # Every rank sends all pieces but its own, and then its own to all others.
        pieces = [parameters * (rank + 1) // ranks - parameters * rank // ranks for rank in range(ranks)]
        once = 2 * (ranks - 1) * sum(codec.payload_bytes(piece) for piece in pieces)
    elif isinstance(codec, BlockCodec) and not codec.linear:
        once = ranks * (ranks - 1) * codec.payload_bytes(parameters)
    exchanges = 16 // int(spec.strategy["sync.period"]) if SYNC_MODES.get(mode).sends_changes else 16
    assert result_of(events).wire_bytes == {"cluster": once * exchanges}


@pytest.mark.parametrize("precision", [name for name in RECIPES.names() if RECIPES.get(name).missing(["cpu"]) is None])
def test_loss_falls_in_every_precision(embedded: EmbeddedRuntime, precision: str) -> None:
    events = list(embedded.run_trial(spec_for(embedded, {"precision.compute": precision}, steps=60)))
    curve = result_of(events).heldout_curve
    assert curve[-1].loss < 0.7 * curve[0].loss
    assert all(math.isfinite(point.loss) for point in curve)
