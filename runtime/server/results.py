"""From the record of a trial to its result."""

import statistics
from collections.abc import Sequence

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.domain.trial import StepSplit, TrialResult, TrialSpec
from paceline.runtime.server.record import Record
from paceline.runtime.server.steps import load_balance_error, mean_split, statistical_efficiency, throughput


def trial_result(
    spec: TrialSpec,
    record: Record,
    *,
    strategy: Strategy,
    cluster: Cluster,
    reference: TrialResult | None,
    peak_memory_bytes: int,
    failure: str | None = None,
    message: str = "",
) -> TrialResult:
    """Sum a trial up.

    Throughput leaves warm-up out unless nothing else is left. Goodput uses the reference trial's held-out curve; the
    efficiency factor carries no error of its own, so the interval is that of the throughput, scaled.
    """
    counted = record.steps[spec.warmup_steps :] or record.steps
    samples = [sum(stop - start for start, stop in step.samples) for step in counted]
    rate, interval = throughput(samples, [step.seconds for step in counted])
    efficiency = statistical_efficiency(record.curve, reference.heldout_curve) if reference else 1.0
    split = mean_split([step.split for step in counted])
    scales = [step.noise_scale for step in counted if step.noise_scale is not None]
    wire_bytes: dict[str, int] = {}
    for step in record.steps:
        for tier, count in step.wire_bytes.items():
            wire_bytes[tier] = wire_bytes.get(tier, 0) + count
    return TrialResult(
        workload=spec.workload,
        cluster=cluster.name,
        strategy=strategy,
        world_size=spec.world_size or cluster.size,
        generations=record.generations,
        steps=len(record.steps),
        samples=record.samples,
        seconds=record.seconds,
        examples_per_second=rate,
        examples_per_second_interval=interval,
        goodput=rate * efficiency,
        # Infinity times an efficiency of 0 would be no number.
        goodput_interval=(interval[0] * efficiency, interval[1] * (efficiency or 1.0)),
        goodput_basis="reference" if reference else "estimate",
        heldout_curve=tuple(record.curve),
        step_seconds=StepSplit(
            compute=split.compute,
            communication_exposed=split.communication_exposed,
            communication_hidden=split.communication_hidden,
            data_wait=split.data_wait,
            snapshot_stall=sum(record.stalls) / max(1, len(record.steps)),
        ),
        wire_bytes=wire_bytes,
        load_balance_error=_systematic_error(counted),
        noise_scale=statistics.median(scales) if scales else None,
        peak_memory_bytes=peak_memory_bytes,
        start_seconds=record.start_seconds,
        snapshot=record.snapshot.snapshot_id if record.snapshot else "",
        failure=failure,
        message=message,
        link_utilisation=record.link_use.utilisation,
        staleness=statistics.fmean(ages) if (ages := [age for step in counted for age in step.staleness]) else 0.0,
        skipped_steps=sum(step.skipped > 0 for step in record.steps),
    )


def _systematic_error(steps: Sequence[StepDone]) -> float:
    """Load-balance error of the ranks' mean compute times under each plan of shares, averaged over steps.

    The mean of each step's error would count jitter as imbalance: some rank always is the slowest.
    """
    by_generation: dict[int, list[StepDone]] = {}
    for step in steps:
        by_generation.setdefault(step.generation, []).append(step)
    weighted = 0.0
    for same in by_generation.values():
        means = [statistics.fmean(times) for times in zip(*(step.compute_seconds for step in same), strict=True)]
        weighted += len(same) * load_balance_error(means)
    return weighted / len(steps) if steps else 0.0
