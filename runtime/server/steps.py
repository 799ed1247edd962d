"""From the ranks' step reports to steps of the job, and from steps to throughput, noise scale and goodput."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from scipy import stats

from paceline.proto.paceline.v1 import control_pb2
from paceline.runtime.convert import from_message
from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.trial import HeldOutPoint, StepSplit
from paceline.runtime.measure import StepReport
from paceline.runtime.samples import rank_range

BLOCKS = 10
"""Batch means that a confidence interval is computed from."""


class StepCollector:
    """Puts the reports of all ranks of a generation together, in step order."""

    def __init__(
        self,
        generation: int,
        shares: Sequence[int],
        *,
        step: int,
        cursor: int,
        on_reports: Callable[[Sequence[StepReport]], None] = lambda reports: None,
    ) -> None:
        """The generation took over after `step` steps at position `cursor` of the sample stream.

        `on_reports` gets the reports of each complete step, one per part of its global batch, in order.
        """
        self._generation = generation
        self._on_reports = on_reports
        self._shares = shares
        self._step = step
        self._cursor = cursor
        # By step and the first position in the sample stream.
        self._waiting: dict[int, dict[int, StepReport]] = {}

    def add(self, reports: Sequence[control_pb2.StepReport]) -> list[StepDone]:
        """Take reports of one rank; the steps that are now complete."""
        for message in reports:
            report = from_message(message, StepReport)
            if report.generation == self._generation:
                self._waiting.setdefault(report.step, {})[report.sample_start] = report
        complete = []
        while len(self._waiting.get(self._step + 1, ())) == len(self._shares):
            complete.append(self._take())
        return complete

    def finish(self, step: int) -> list[StepDone]:
        """The generation has ended after `step`: the steps up to there that still miss a report.

        A rank that died before it could report is taken to have done as the lowest rank that reported.
        """
        rest = []
        while self._step < step and self._waiting.get(self._step + 1):
            reports = self._waiting[self._step + 1]
            known = reports[min(reports)]
            for rank in range(len(self._shares)):
                start, stop = rank_range(self._cursor, self._shares, rank)
                missing = dataclasses.replace(known, rank=rank, sample_start=start, sample_stop=stop)
                reports.setdefault(start, missing)
            rest.append(self._take())
        return rest

    def _take(self) -> StepDone:
        self._step += 1
        self._cursor += sum(self._shares)
        by_start = self._waiting.pop(self._step)
        reports = [by_start[start] for start in sorted(by_start)]
        self._on_reports(reports)
        return _combine(reports)


def _combine(reports: Sequence[StepReport]) -> StepDone:
    samples = sum(report.samples for report in reports)
    wire_bytes: dict[str, int] = {}
    for report in reports:
        for tier, count in report.wire_bytes.items():
            wire_bytes[tier] = wire_bytes.get(tier, 0) + count
    return StepDone(
        step=reports[0].step,
        generation=reports[0].generation,
        seconds=statistics.fmean(report.seconds for report in reports),
        split=mean_split([report.split for report in reports]),
        loss=sum(report.loss * report.samples for report in reports) / samples,
        wire_bytes=wire_bytes,
        samples=tuple((report.sample_start, report.sample_stop) for report in reports),
        noise_scale=noise_scale(reports),
        load_balance_error=load_balance_error([report.split.compute for report in reports]),
        compute_seconds=tuple(report.split.compute for report in reports),
        staleness=tuple(report.staleness for report in reports),
        optimizer_seconds=tuple(report.optimizer_seconds for report in reports),
        skipped=sum(report.skipped for report in reports),
        loss_scale=min(report.loss_scale for report in reports),
        exchange_seconds=min(report.split.communication for report in reports),
    )


def mean_split(splits: Sequence[StepSplit]) -> StepSplit:
    """The mean of each part, s."""
    if not splits:
        return StepSplit()
    parts = ("compute", "communication_exposed", "communication_hidden", "data_wait", "snapshot_stall")
    return StepSplit(**{part: statistics.fmean(getattr(split, part) for split in splits) for part in parts})


def load_balance_error(compute_seconds: Sequence[float]) -> float:
    """(slowest - mean)/mean; 0 where nothing was computed."""
    mean = statistics.fmean(compute_seconds)
    return (max(compute_seconds) - mean) / mean if mean > 0 else 0.0


def noise_scale(reports: Sequence[StepReport]) -> float | None:
    """Gradient noise scale in samples, or None where norms were not measured or noise hides the gradient.

    Compares the gradient over a rank's samples with that over the global batch (McCandlish et al., "An Empirical
    Model of Large-Batch Training", arXiv:1812.06162, appendix A). One step's value is noisy: average numerators and
    denominators, or take a median, over many.
    """
    if len(reports) < 2 or any(
        report.local_square_norm is None or report.mean_square_norm is None for report in reports
    ):
        return None
    big = float(sum(report.samples for report in reports))
    small = big / len(reports)
    big_norm = statistics.fmean(report.mean_square_norm or 0.0 for report in reports)
    small_norm = statistics.fmean(report.local_square_norm or 0.0 for report in reports)
    gradient = (big * big_norm - small * small_norm) / (big - small)
    noise = (small_norm - big_norm) / (1 / small - 1 / big)
    return noise / gradient if gradient > 0 and noise > 0 else None


def throughput(samples: Sequence[int], seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Examples/s over a run of steps and its 95 % interval by the method of batch means (Student's t).

    Consecutive steps are correlated, so the interval comes from means over blocks of steps. With fewer than two
    blocks it is unbounded: (0, inf).
    """
    if not seconds or sum(seconds) <= 0:
        return 0.0, (0.0, math.inf)
    rate = sum(samples) / sum(seconds)
    size = max(1, len(seconds) // BLOCKS)
    starts = range(0, len(seconds) - size + 1, size)
    blocks = [sum(samples[i : i + size]) / sum(seconds[i : i + size]) for i in starts]
    if len(blocks) < 2:
        return rate, (0.0, math.inf)
    half = float(stats.t.ppf(0.975, len(blocks) - 1)) * statistics.stdev(blocks) / math.sqrt(len(blocks))
    return rate, (max(0.0, rate - half), rate + half)


def statistical_efficiency(curve: Sequence[HeldOutPoint], reference: Sequence[HeldOutPoint]) -> float:
    """Samples the reference needs to reach a loss / samples this trial needs for the same loss.

    The loss is the lowest that both reached, so neither curve is extrapolated. Curves are made monotone (best loss
    so far) and read by linear interpolation between evaluations. 0 when the trial never got below its start.
    """
    mine, theirs = _best_so_far(curve), _best_so_far(reference)
    if not mine or not theirs:
        return 0.0
    level = max(mine[-1][1], theirs[-1][1])
    needed, reference_needed = _samples_to(mine, level), _samples_to(theirs, level)
    return reference_needed / needed if needed > 0 else 0.0


def _best_so_far(curve: Sequence[HeldOutPoint]) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for point in curve:
        if math.isfinite(point.loss) and (not best or point.loss < best[-1][1]):
            best.append((float(point.samples), point.loss))
    return best


def _samples_to(curve: list[tuple[float, float]], level: float) -> float:
    for (samples, loss), (later, lower) in itertools.pairwise(curve):
        if lower <= level <= loss:
            return samples + (later - samples) * (loss - level) / (loss - lower)
    return curve[0][0]
