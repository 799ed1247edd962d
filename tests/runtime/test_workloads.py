"""What every workload promises, for every registered workload and variant."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.runtime.errors import InvalidRequest, UnknownName
from paceline.runtime.workloads import create, references, register_class
from paceline.runtime.workloads.base import WORKLOADS, Workload

VARIANTS = [reference for reference in references() if "/" in reference or len(WORKLOADS.get(reference).variants) == 1]
every_variant = pytest.mark.parametrize("reference", VARIANTS)


def smallest_variant(name: str) -> str:
    own = [reference for reference in VARIANTS if reference.partition("/")[0] == name]
    return min(own, key=lambda reference: create(reference).flops_per_sample())


def tensors(batch: Any) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else [tensor for part in batch for tensor in tensors(part)]


def seeded_model(workload: Workload, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return workload.model()


def heldout_loss(workload: Workload, model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(workload.loss(model, workload.batch(torch.arange(workload.heldout_samples), heldout=True)))


@every_variant
@pytest.mark.parametrize("heldout", [False, True])
def test_a_batch_is_a_pure_function_of_its_indices(reference: str, heldout: bool) -> None:
    workload = create(reference)
    size = workload.heldout_samples if heldout else workload.train_samples
    indices = torch.tensor([0, size - 1, 5, 0, size // 2])
    together = tensors(workload.batch(indices, heldout=heldout))
    for position, index in enumerate(indices.tolist()):
        alone = tensors(workload.batch(torch.tensor([index]), heldout=heldout))
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[position], single[0])
    with pytest.raises(IndexError):
        workload.batch(torch.tensor([size]), heldout=heldout)


@every_variant
def test_a_changed_batch_does_not_change_the_data(reference: str) -> None:
    workload = create(reference)
    indices = torch.tensor([0, 1])
    before = [tensor.clone() for tensor in tensors(workload.batch(indices))]
    for tensor in tensors(workload.batch(indices)):
        tensor.zero_()
    for one, two in zip(before, tensors(workload.batch(indices)), strict=True):
        assert torch.equal(one, two)


@every_variant
def test_another_instance_has_the_same_data(reference: str) -> None:
    name, _, variant = reference.partition("/")
    cls = WORKLOADS.get(name)
    one, two = create(reference), cls(**cls.variants[variant])
    assert (one.train_samples, one.heldout_samples) == (two.train_samples, two.heldout_samples)
    indices = torch.arange(0, one.train_samples, 97)
    for first, second in zip(tensors(one.batch(indices)), tensors(two.batch(indices)), strict=True):
        assert torch.equal(first, second)


@every_variant
def test_held_out_samples_are_not_trained_on(reference: str) -> None:
    workload = create(reference)

    def samples(size: int, *, heldout: bool) -> list[bytes]:
        parts = tensors(workload.batch(torch.arange(size), heldout=heldout))
        inputs = parts[0].flatten(1).to(torch.uint8 if not parts[0].is_floating_point() else parts[0].dtype)
        return [row.numpy().tobytes() for row in inputs]

    trained = set(samples(workload.train_samples, heldout=False))
    held = samples(workload.heldout_samples, heldout=True)
    assert len(set(held)) > 0.95 * len(held)
    assert sum(sample in trained for sample in held) < 0.05 * len(held)


def test_held_out_text_hardly_occurs_anywhere_in_the_training_files() -> None:
    workload = create("bytes-lm")
    text = workload.batch(torch.arange(workload.train_samples)).to(torch.uint8).numpy().tobytes()
    windows = workload.batch(torch.arange(workload.heldout_samples), heldout=True).to(torch.uint8).numpy()
    copied = sum(window.tobytes() in text for window in windows)
    assert copied < 0.1 * len(windows), "more than copied headers and helper functions"


@every_variant
def test_equal_seeds_give_equal_weights(reference: str) -> None:
    workload = create(reference)
    one, two, other = (seeded_model(workload, seed).state_dict() for seed in (1, 1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@every_variant
def test_the_loss_is_the_mean_over_samples(reference: str) -> None:
    workload = create(reference)
    model = seeded_model(workload, 0)
    indices = torch.tensor([3, 1, 4, 15, 9, 26])
    with torch.no_grad():
        whole = workload.loss(model, workload.batch(indices))
        head = workload.loss(model, workload.batch(indices[:2]))
        tail = workload.loss(model, workload.batch(indices[2:]))
    assert whole.shape == ()
    torch.testing.assert_close(whole, (2 * head + 4 * tail) / 6)


@every_variant
def test_every_parameter_is_trained_and_nothing_else_is_kept(reference: str) -> None:
    workload = create(reference)
    model = seeded_model(workload, 0)
    workload.loss(model, workload.batch(torch.arange(2))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not list(model.buffers())


@every_variant
def test_the_profile_describes_the_real_model(reference: str) -> None:
    workload = create(reference)
    profile = workload.profile(reference)
    parameters = list(workload.model().parameters())
    assert profile.name == reference
    assert profile.doc
    assert profile.parameters == sum(parameter.numel() for parameter in parameters)
    assert profile.parameter_tensors == len(parameters)
    assert profile.train_samples > profile.heldout_samples >= profile.global_batch


@pytest.mark.parametrize("name", WORKLOADS.names())
def test_the_loss_falls_within_a_few_dozen_steps(name: str) -> None:
    workload = create(smallest_variant(name))
    model = seeded_model(workload, 0)
    optimizer = workload.optimizer(model.parameters())
    order = torch.randperm(workload.train_samples, generator=torch.Generator().manual_seed(0))
    before = heldout_loss(workload, model)
    for indices in order[: 40 * workload.global_batch].split(workload.global_batch):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(indices)).backward()
        optimizer.step()
    assert heldout_loss(workload, model) < 0.75 * before


def test_references_name_every_variant_and_the_bare_name_means_the_first() -> None:
    assert {"bytes-lm", "bytes-lm/tiny", "bytes-lm/small", "bytes-lm/medium", "digits-cnn"} <= set(references())
    assert create("bytes-lm").profile("x") == create("bytes-lm/small").profile("x")
    assert create("bytes-lm/tiny") is create("bytes-lm/tiny")


@pytest.mark.parametrize(
    ("reference", "nearest"),
    [
        ("bytes-ml", "bytes-lm"),
        ("bytes-lm/tinny", "bytes-lm/tiny"),
        ("digit_cnn", "digits-cnn"),
        ("digits-cnn/", "digits-cnn"),
    ],
)
def test_an_unknown_reference_proposes_the_nearest(reference: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"^unknown workload '{reference}'; did you mean '{nearest}'\\?$"):
        create(reference)


OPERATORS_FILE = """
import torch
from paceline.runtime.workloads.base import Workload

class Line(Workload):
    name = "line"
    doc = "A line through points."
    global_batch = 8
    train_samples = 64
    heldout_samples = 16
    def model(self): return torch.nn.Linear(1, 1)
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def batch(self, indices, *, heldout=False): return indices[:, None] / 64.0
    def loss(self, model, batch): return (model(batch) - 3 * batch).square().mean()
    def flops_per_sample(self): return 6.0

class Digits(Line):
    name = "digits-cnn"

class Nothing(Line):
    name = "nothing"
    variants = {}

NotOne = int
"""


@pytest.fixture
def operators_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module an operator wrote; what it registers is forgotten after the test."""
    (tmp_path / "operators_file.py").write_text(OPERATORS_FILE)
    (tmp_path / "broken_file.py").write_text("1/0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "operators_file", raising=False)
    monkeypatch.setattr(WORKLOADS, "_plugins", dict(WORKLOADS._plugins))
    return "operators_file"


def test_an_operator_registers_a_class(operators_module: str) -> None:
    register_class(f"{operators_module}:Line")
    assert "line" in references()
    assert create("line").profile("line").parameters == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Line", r"cannot be imported \(No module named 'no_such_module'\); write it module:Class"),
        ("operators_file:Lin", "cannot be imported .* has no attribute 'Lin'"),
        ("operators_file", "cannot be imported .* write it module:Class"),
        ("", "cannot be imported"),
        ("broken_file:Line", r"cannot be imported \(division by zero\)"),
        ("operators_file:NotOne", "is not a subclass of paceline.runtime.workloads.base.Workload"),
        ("operators_file:Nothing", "needs at least one variant; leave `variants` out"),
        ("operators_file:Digits", "'digits-cnn' is already registered by .*; give it another name"),
    ],
)
@pytest.mark.usefixtures("operators_module")
def test_what_cannot_be_registered_is_refused_in_one_line(path: str, message: str) -> None:
    known = references()
    with pytest.raises(InvalidRequest, match=message) as refused:
        register_class(path)
    assert "\n" not in str(refused.value)
    assert references() == known
