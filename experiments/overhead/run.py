"""Examples/s of the default strategy under Paceline against a hand-written DDP loop on the same workload.

    python -m experiments.overhead.run

The two take turns, so that a change of the machine's speed hits both. The hand-written loop is what a tutorial
shows: spawn, DistributedDataParallel, forward, backward, step. Warm-up is left out on both sides.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from experiments.resumable import Results, spread, table
from paceline.runtime import workloads
from paceline.runtime.api import run_to_result
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.samples import SampleStream

HERE = Path(__file__).parent
WORLD_SIZE = 4
ROUNDS = 5
WARMUP = 10
STEPS = {"bytes-lm/small": 60, "bytes-lm/tiny": 300}


def _rank(rank: int, reference: str, steps: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    workload = workloads.create(reference)
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.model())
    optimizer = workload.optimizer(model.parameters())
    stream = SampleStream(workload.train_samples, 0)
    share = workload.global_batch // WORLD_SIZE
    began = 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            began = time.perf_counter()
        start = step * workload.global_batch + rank * share
        batch = workload.batch(stream.indices(start, start + share))
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    if rank == 0:
        Path(out).write_text(str(steps * workload.global_batch / seconds))
    dist.destroy_process_group()


def by_hand(reference: str, steps: int) -> float:
    """Examples/s of the hand-written loop."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rate"
        mp.spawn(_rank, args=(reference, steps, f"{folder}/store", str(out)), nprocs=WORLD_SIZE)
        return float(out.read_text())


def by_paceline(runtime: EmbeddedRuntime, reference: str, steps: int) -> float:
    """Examples/s of a trial of the default strategy."""
    spec = TrialSpec(
        workload=reference,
        strategy=runtime.describe_knobs().default,
        budget=Budget(steps=WARMUP + steps),
        warmup_steps=WARMUP,
        evaluations=1,
    )
    return run_to_result(runtime, spec).examples_per_second


def main() -> None:
    """Run what is missing, then write the table."""
    results = Results(HERE)
    rows = []
    for reference, steps in STEPS.items():
        pairs = [
            results.get(f"{reference} {index}", lambda: _pair(reference, steps))  # noqa: B023 - called at once
            for index in range(ROUNDS)
        ]
        ratios = [paceline / hand for paceline, hand in pairs]
        rows.append(
            [
                reference,
                spread([hand for _, hand in pairs]),
                spread([paceline for paceline, _ in pairs]),
                spread(ratios),
                "yes" if statistics.median(ratios) >= 0.95 else "no",
            ]
        )
    header = ["workload", "hand-written DDP, examples/s", "Paceline default, examples/s", "ratio", "ratio >= 0.95"]
    text = f"Median [smallest, largest] of {ROUNDS} alternating runs, {WORLD_SIZE} ranks.\n\n" + table(header, rows)
    (HERE / "table.md").write_text(text)
    print(text)


_RUNTIMES: list[EmbeddedRuntime] = []


def _pair(reference: str, steps: int) -> tuple[float, float]:
    if not _RUNTIMES:
        _RUNTIMES.append(EmbeddedRuntime(f"local:{WORLD_SIZE}"))
    return by_paceline(_RUNTIMES[0], reference, steps), by_hand(reference, steps)


if __name__ == "__main__":
    try:
        main()
    finally:
        for embedded in _RUNTIMES:
            embedded.close()
