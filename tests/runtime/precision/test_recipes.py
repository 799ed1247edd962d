"""What each recipe computes, and where it is refused."""

from collections.abc import Collection

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.errors import IllegalStrategy, InvalidRequest
from paceline.runtime.knobs import knob_space
from paceline.runtime.precision import RECIPES, check_devices
from paceline.runtime.precision.fp8 import _round
from tests.runtime.support import RunningTrial, endless, result_of

TF32 = "precision.compute=tf32 needs CUDA devices of compute capability 8.0 or higher, and the devices are {}; "
FP8 = "precision.compute=fp8 needs CUDA devices of compute capability 8.9 or higher, and the devices are {}; "
REFUSED = [
    ("tf32", ["cpu", "cpu"], TF32.format("cpu") + "set precision.compute=fp32"),
    ("tf32", ["cuda:8.0", "cuda:7.5"], TF32.format("cuda:7.5, cuda:8.0") + "set precision.compute=fp32"),
    ("fp8", ["cpu"], FP8.format("cpu") + "set precision.compute=bf16"),
    ("fp8", ["cuda:9.0", "cpu"], FP8.format("cpu, cuda:9.0") + "set precision.compute=bf16"),
    ("fp8", ["cuda:8.6"], FP8.format("cuda:8.6") + "set precision.compute=bf16"),
]


@pytest.mark.parametrize(("name", "kinds", "message"), REFUSED)
def test_devices_that_cannot_are_named_with_the_nearest_choice(name: str, kinds: Collection[str], message: str) -> None:
    strategy = knob_space().strategy({"precision.compute": name})
    with pytest.raises(IllegalStrategy) as refused:
        check_devices(strategy, kinds)
    assert str(refused.value) == message
    assert RECIPES.get(RECIPES.get(name).nearest).missing(kinds) is None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, ["cpu", "cuda:7.0"]) for name in ("fp32", "bf16", "fp16")),
        ("tf32", ["cuda:8.0"]),
        ("fp8", ["cuda:8.9", "cuda:10.0"]),
    ],
)
def test_devices_that_can_are_not_refused(name: str, kinds: Collection[str]) -> None:
    check_devices(knob_space().strategy({"precision.compute": name}), kinds)


@pytest.mark.parametrize("name", ["tf32", "fp8"])
def test_a_trial_and_a_switch_are_refused_before_anything_changes(runtime: RuntimeAPI, name: str) -> None:
    default = runtime.describe_knobs().default
    strategy = Strategy.of({**default, "precision.compute": name})
    message = next(text for refused, kinds, text in REFUSED if refused == name and set(kinds) == {"cpu"})
    before = len(runtime.list_trials())
    with pytest.raises(InvalidRequest) as refused:
        next(iter(runtime.run_trial(TrialSpec(workload="regression", strategy=strategy, budget=Budget(steps=1)))))
    assert (str(refused.value), len(runtime.list_trials())) == (message, before)
    trial = RunningTrial(runtime, endless(runtime))
    trial.wait_for(lambda event: isinstance(event, StepDone))
    with pytest.raises(InvalidRequest) as refused:
        runtime.update_strategy(trial.trial_id, strategy)
    assert str(refused.value) == message
    runtime.cancel_trial(trial.trial_id)
    result = result_of(trial.wait())
    assert (result.generations, result.strategy) == (1, default)


def test_tf32_holds_during_a_step_alone() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with RECIPES.get("tf32")().step_context():
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before != "tf32"


def computed(recipe: str, layer: nn.Linear, inputs: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias, of a scalar that weighs every output differently."""
    inputs = inputs.clone().requires_grad_()
    with RECIPES.get(recipe)().forward_context("cpu"):
        output = layer(inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    wanted = [inputs, *layer.parameters()]
    return [output.detach().float(), *torch.autograd.grad((output.float() * weights).sum(), wanted)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_fp8_is_fp32_to_within_its_rounding(size: float, bias: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(64, 48, bias=bias), size * torch.randn(2, 16, 64)
    for exact, rounded in zip(computed("fp32", layer, inputs), computed("fp8", layer, inputs), strict=True):
        error = float(torch.linalg.vector_norm(rounded - exact) / torch.linalg.vector_norm(exact))
        # Two factors of three or four bits each, in sums over 32 and more products, and the output in bf16.
        assert error < 0.1
        assert rounded.dtype is torch.float32
    # That it is not simply bf16 shows in the gradient of the weights.
    of_weight, exact = computed("fp8", layer, inputs)[2], computed("fp32", layer, inputs)[2]
    assert torch.linalg.vector_norm(of_weight - exact) > 0.01 * torch.linalg.vector_norm(exact)


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(15, 64, 48), (16, 60, 48), (16, 64, 40)])
def test_what_fits_no_8_bit_product_is_bf16(rows: int, columns: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(columns, outputs), torch.randn(rows, columns)
    for rounded, expected in zip(computed("fp8", layer, inputs), computed("bf16", layer, inputs), strict=True):
        assert torch.equal(rounded, expected)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_rounding_is_relative_down_to_the_smallest_normal_number(
    dtype: torch.dtype, bits: int, values: list[float]
) -> None:
    tensor = torch.tensor(values)
    rounded, scale = _round(tensor, dtype)
    assert rounded.is_contiguous()
    error = (rounded.float() * scale - tensor).abs()
    smallest = torch.finfo(dtype).tiny * scale
    assert (error <= 1.001 * 2.0 ** -(bits + 1) * torch.maximum(tensor.abs(), smallest)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_fp8(bad: float) -> None:
    layer, inputs = nn.Linear(32, 16), torch.ones(16, 32)
    inputs[3, 5] = bad
    output, _, of_weight, _ = computed("fp8", layer, inputs)
    assert not output.isfinite().all()
    assert not of_weight.isfinite().all()


def test_fp8_learns() -> None:
    """By the product that a CPU has, so this is the recipe as a GPU would run it but for the hardware."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    inputs = torch.randn(64, 32)
    targets = inputs @ torch.randn(32, 16) / 32**0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(60):
        with RECIPES.get("fp8")().forward_context("cpu"):
            loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
