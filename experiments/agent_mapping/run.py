"""Does a policy that was trained in the simulator pick good mappings on clusters that it has never seen?

    python -m experiments.agent_mapping.run        (as root)

A policy is trained as `paceline train` does it, on random clusters. Five lab clusters are built, one after the other.
On each, every mapping that the mappers and share rules propose is tried live, in turns. The policy sees the probed
cluster profile and the reference trial alone and has one trial; what it settles on is judged by the mean of all live
trials of that mapping.
"""

import itertools
import statistics
from pathlib import Path
from typing import Any

from experiments.resumable import Results, table
from paceline.env.observation import TuningCase
from paceline.runtime.api import RuntimeAPI, run_to_result
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import Budget, TrialResult, TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.mapping import MAPPERS, SHARES
from paceline.tuner.policy.decide import PlannerPolicy, Policy
from paceline.tuner.policy.store import load
from paceline.tuner.train import TrainConfig, train

HERE = Path(__file__).parent
CLUSTERS = ("three-racks", "old-and-new", "thin-and-mixed", "even-pair", "one-straggler")
WORKLOAD = "bytes-lm/small"
SECONDS = 12.0
ROUNDS = 2
POLICY = HERE / "policy"
DEFAULT = "scheduler, even"
TRAINING = TrainConfig(timesteps=60_000)


def mappings(runtime: RuntimeAPI) -> dict[str, Strategy]:
    """Every order with every share rule; the default first."""
    space = runtime.describe_knobs()
    return {
        f"{order}, {share}": space.strategy({"mapping.order": order, "mapping.batch_share": share})
        for order, share in itertools.product(MAPPERS.names(), SHARES.names())
    }


def try_all(runtime: RuntimeAPI, policies: list[Policy]) -> dict[str, Any]:
    """Examples/s of every mapping in every round, and what each policy picks after one reference trial."""
    candidates = mappings(runtime)
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    reference: TrialResult | None = None
    for _ in range(ROUNDS):
        for name, strategy in candidates.items():
            spec = TrialSpec(
                workload=WORKLOAD, strategy=strategy, budget=Budget(seconds=SECONDS), evaluations=1, warmup_steps=10
            )
            result = run_to_result(runtime, spec)
            assert result.failure is None, result.message
            rates[name].append(result.examples_per_second)
            reference = reference or result
    assert reference is not None
    names = list(candidates)
    (profile,) = [each for each in runtime.list_workloads() if each.name == WORKLOAD]
    case = TuningCase(
        space=runtime.describe_knobs(),
        workload=profile,
        cluster=runtime.describe_cluster(),
        candidates=tuple(candidates.values()),
        trials_budget=1,
    )
    picks = {}
    for policy in policies:
        tried = names[policy.choose(case, [reference])]
        # As in a session of one trial: what was tried is kept if that trial beat the reference trial.
        picks[policy.name] = tried if rates[tried][0] > reference.examples_per_second else DEFAULT
    return {"rates": rates, "picks": picks}


def main() -> None:
    """Train, try what is missing, and write the table."""
    results = Results(HERE)
    if not POLICY.exists():
        train(TRAINING, POLICY)
    policies: list[Policy] = [load(POLICY), PlannerPolicy()]
    for cluster in CLUSTERS:
        if cluster not in results.entries:
            with EmbeddedRuntime(f"lab:{HERE / 'clusters' / cluster}.yaml") as runtime:
                results.get(cluster, lambda: try_all(runtime, policies))
    rows = []
    for cluster in CLUSTERS:
        entry = results.entries[cluster]
        rates = {name: statistics.fmean(values) for name, values in entry["rates"].items()}
        best = max(rates, key=rates.__getitem__)
        pick = entry["picks"][policies[0].name]
        rows.append(
            [
                cluster,
                f"{rates[DEFAULT]:.1f}",
                f"{best}: {rates[best]:.1f}",
                f"{pick}: {rates[pick]:.1f}",
                f"{rates[pick] / rates[best]:.2f}",
                f"{rates[entry['picks']['planner']] / rates[best]:.2f}",
            ]
        )
    text = f"Examples/s of {WORKLOAD}; every mapping live, mean of {ROUNDS} trials of {SECONDS:g} s.\n\n"
    header = ["cluster", "as scheduled", "best mapping", "the policy's pick", "pick / best", "planner's / best"]
    text += table(header, rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
