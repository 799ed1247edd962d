"""What it costs to start a trial on warm workers, and to switch the strategy of a running one.

python -m experiments.warm_start.run
"""

import statistics
from pathlib import Path

from experiments.resumable import spread, table
from paceline.runtime.api import run_to_result
from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.domain.events import StepDone, TrialStarted
from paceline.runtime.domain.trial import Budget, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime

HERE = Path(__file__).parent
WORKLOADS = ("bytes-lm/small", "digits-cnn")
TRIALS = 7
SWITCHES: tuple[dict[str, KnobValue], ...] = (
    {"compress.codec": "topk"},
    {"compress.codec": "bf16"},
    {"sync.mode": "local_sgd"},
    {},
    {"mapping.order": "3,2,1,0"},
)
STEPS_BETWEEN = 15
ROUNDS = 3


def starts(runtime: EmbeddedRuntime, workload: str) -> list[float]:
    """Seconds to the first step of the second and later trials."""
    spec = TrialSpec(
        workload=workload, strategy=runtime.describe_knobs().default, budget=Budget(steps=5), evaluations=1
    )
    return [run_to_result(runtime, spec).start_seconds for _ in range(TRIALS)][1:]


def switches(runtime: EmbeddedRuntime, workload: str) -> tuple[float, list[tuple[str, float]]]:
    """Median step of a trial, s, and for each switch what it was to and for how long no rank trained, s."""
    space = runtime.describe_knobs()
    pending = list(SWITCHES)
    spec = TrialSpec(
        workload=workload,
        strategy=space.default,
        budget=Budget(steps=STEPS_BETWEEN * (len(SWITCHES) + 1)),
        evaluations=1,
    )
    trial_id, stood, steps = "", [], []
    for event in runtime.run_trial(spec):
        if isinstance(event, TrialStarted):
            trial_id = event.trial_id
            if event.step:
                stood.append((event.strategy.describe(space.default), event.standstill_seconds))
        elif isinstance(event, StepDone):
            steps.append(event.seconds)
            if event.step % STEPS_BETWEEN == 0 and pending:
                runtime.update_strategy(trial_id, space.strategy(pending.pop(0)))
    return statistics.median(steps), stood


def main() -> None:
    """Measure and write the table."""
    rows = []
    with EmbeddedRuntime("local:4") as runtime:
        for workload in WORKLOADS:
            rows.append([workload, "start of a trial on warm workers", spread(starts(runtime, workload)), ""])
            rounds = [switches(runtime, workload) for _ in range(ROUNDS)]
            step = statistics.median(step for step, _ in rounds)
            rows.append([workload, "step of the default strategy", f"{step:.3g}", "1"])
            for index in range(len(SWITCHES)):
                times = [stood[index][1] for _, stood in rounds]
                name = f"switch to {rounds[0][1][index][0]}"
                rows.append([workload, name, spread(times), f"{statistics.median(times) / step:.2f}"])
    text = f"Median [smallest, largest], s; 4 ranks; {TRIALS - 1} starts, {ROUNDS} rounds of switches.\n\n"
    text += table(["workload", "what", "seconds", "steps"], rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
