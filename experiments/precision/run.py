"""What the number formats are worth on this machine's processor.

    python -m experiments.precision.run

First the product of two square matrices on one thread, the best of many; then trials that differ in
`precision.compute` alone, taking turns, so that a change of the machine's speed hits all of them. Whether a format
gains depends on whether the processor multiplies in it; without such units PyTorch converts element by element.
"""

import statistics
import time
from pathlib import Path

import torch

from experiments.resumable import Results, spread, table
from paceline.runtime.api import run_to_result
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

HERE = Path(__file__).parent
UNITS = ("amx_bf16", "avx512_bf16", "amx_fp16", "avx512_fp16")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZE = 512
REPEATS = 10
WORLD_SIZE = 4
WORKLOADS = {"bytes-lm/tiny": 60, "bytes-lm/small": 12}
"""Steps that count."""
WARMUP = 3
ROUNDS = 3


def units() -> list[str]:
    """Which of the units for 16-bit products the processor has."""
    found = torch.cpu.get_capabilities()
    return [name for name in UNITS if found.get(name)]


def rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a product on one thread."""
    torch.set_num_threads(1)
    left, right = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - began)
    return 2 * SIZE**3 / best / 1e9


def examples_per_second(runtime: EmbeddedRuntime, workload: str, precision: str) -> float:
    """Of one trial."""
    spec = TrialSpec(
        workload=workload,
        strategy=runtime.describe_knobs().strategy({"precision.compute": precision}),
        budget=Budget(steps=WARMUP + WORKLOADS[workload]),
        warmup_steps=WARMUP,
        evaluations=1,
    )
    result = run_to_result(runtime, spec)
    assert result.failure is None, result.message
    return result.examples_per_second


def main() -> None:
    """Measure what is missing, then write the table."""
    results = Results(HERE)
    have = results.get("units", units)
    rows = []
    products = {
        name: results.get(f"product {name}", lambda: rate(dtype))  # noqa: B023 - called at once
        for name, dtype in FORMATS.items()
    }
    for name in FORMATS:
        ratio = products[name] / products["fp32"]
        rows.append([f"product of {SIZE} x {SIZE}, GFLOP/s", name, f"{products[name]:.3g}", f"{ratio:.3g}"])
    with EmbeddedRuntime(f"local:{WORLD_SIZE}") as runtime:
        for workload in WORKLOADS:
            rates: dict[str, list[float]] = {name: [] for name in FORMATS}
            for turn in range(ROUNDS):
                for name in FORMATS:
                    rates[name].append(
                        results.get(
                            f"{workload} {name} {turn}",
                            lambda: examples_per_second(runtime, workload, name),  # noqa: B023 - called at once
                        )
                    )
            middle = statistics.median(rates["fp32"])
            for name in FORMATS:
                ratio = statistics.median(rates[name]) / middle
                rows.append([f"{workload}, examples/s", name, spread(rates[name]), f"{ratio:.3g}"])
    text = (
        f"Units for 16-bit products: {', '.join(have) or 'none'}. Trials: median [smallest, largest] of {ROUNDS} that "
        f"take turns, {WORLD_SIZE} ranks.\n\n"
    )
    text += table(["what", "precision.compute", "rate", "to fp32"], rows)
    if not have:
        text += (
            "\nThis processor has no units for bf16 or fp16, so there is nothing to gain here: PyTorch emulates the "
            "products.\n"
        )
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
