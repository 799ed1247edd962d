"""Six strategies of very different speed on two racks, each tried three times in random order.

    python -m experiments.lab_repeatability.run        (as root)

Asks whether trials in the lab can be told apart: the spread of examples/s over the repetitions, and whether every
round ranks the strategies alike.
"""

import random
import statistics
from pathlib import Path

from experiments.resumable import Results, table
from paceline.runtime.api import RuntimeAPI, run_to_result
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

HERE = Path(__file__).parent
LAB = "lab:two-racks"
WORKLOAD = "bytes-lm/small"
SECONDS = 15.0
LOCAL_STEPS, AVERAGINGS = 96, 8
"""A trial of local SGD is measured over so many steps and averagings at least, after one period of warm-up: how many
averagings fall into so many seconds is a matter of luck."""
ROUNDS = 3
STRATEGIES = (
    [],
    ["compress.codec=fp16"],
    ["mapping.order=topology"],
    ["sync.mode=hierarchical", "sync.bucket_mb=1"],
    ["sync.mode=local_sgd", "sync.period=8"],
    ["sync.mode=local_sgd", "sync.period=32", "mapping.order=topology"],
)


def rate(runtime: RuntimeAPI, settings: list[str]) -> float:
    """Examples/s of a trial."""
    space = runtime.describe_knobs()
    strategy = space.strategy(space.parse(settings))
    budget, warmup = Budget(seconds=SECONDS), 5
    if strategy["sync.mode"] == "local_sgd":
        warmup = int(strategy["sync.period"])
        budget = Budget(steps=max(LOCAL_STEPS, AVERAGINGS * warmup) + warmup)
    spec = TrialSpec(workload=WORKLOAD, strategy=strategy, budget=budget, evaluations=1, warmup_steps=warmup)
    result = run_to_result(runtime, spec)
    assert result.failure is None, result.message
    return result.examples_per_second


def main() -> None:
    """Try what is missing and write the table."""
    results = Results(HERE)
    names = [", ".join(settings) or "default" for settings in STRATEGIES]
    shuffled = random.Random(0)
    trials = [(turn, index) for turn in range(ROUNDS) for index in shuffled.sample(range(len(names)), len(names))]
    if any(f"{names[index]}, round {turn}" not in results.entries for turn, index in trials):
        with EmbeddedRuntime(LAB) as runtime:
            # The first trial of a runtime is slower than any later one.
            rate(runtime, [])
            for turn, index in trials:
                results.get(f"{names[index]}, round {turn}", lambda: rate(runtime, STRATEGIES[index]))  # noqa: B023
    rates = {name: [results.entries[f"{name}, round {turn}"] for turn in range(ROUNDS)] for name in names}
    rankings = {tuple(sorted(names, key=lambda name: rates[name][turn])) for turn in range(ROUNDS)}
    rows = [
        [name, *(f"{each:.1f}" for each in values), f"{(max(values) - min(values)) / statistics.median(values):.1%}"]
        for name, values in rates.items()
    ]
    text = (
        f"Examples/s of {WORKLOAD} on {LAB}, in {SECONDS:g} s each or, with local SGD, in {LOCAL_STEPS} steps and "
        f"{AVERAGINGS} periods at least; "
        "spread = (largest - smallest) / median.\n\n"
    )
    text += table(["strategy", *(f"round {turn + 1}" for turn in range(ROUNDS)), "spread"], rows)
    text += f"\nThe rounds rank the strategies in {len(rankings)} way{'s' if len(rankings) > 1 else ''}.\n"
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
