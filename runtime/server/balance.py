"""Watches how the load is shared while a trial runs, and says when batch shares should be planned anew."""

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runtime.domain.cluster import Cluster
from paceline.runtime.domain.events import StepDone
from paceline.runtime.mapping.base import round_shares


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """When a shift of the load counts."""

    threshold: float = 0.15
    """Part by which a rank's compute time may differ from the median rank's before shares are planned anew, above 0."""
    gain: float = 0.05
    """Part of the slowest rank's time that new shares must save, so that rounding to whole samples cannot make the
    plan swing to and fro; above 0."""
    window_seconds: float = 6.0
    """Stretch of training in which a shift must last to count, s; it is acted upon by the end of the stretch."""
    window_steps: int = 8
    """Steps that the stretch has at least."""


class LoadWatch:
    """Judges the ranks' compute times under one plan of shares. Every generation gets a new one."""

    def __init__(self, shares: Sequence[int], config: BalanceConfig | None = None, *, calibrates: bool = False) -> None:
        """With `calibrates` any gain counts at the end of the first window: the shares come from a probe, which does
        not know how fast the devices are at this workload."""
        self._shares = shares
        self._calibrates = calibrates
        self._config = config or BalanceConfig()
        self._steps: deque[StepDone] = deque()
        self._seconds = 0.0

    def add(self, step: StepDone) -> tuple[float, ...] | None:
        """Take a step; if the load has moved, the speeds in samples/s, by rank, that balance it.

        Medians over the window are judged: single steps differ by much more than the threshold where cores are shared.
        """
        config = self._config
        self._steps.append(step)
        self._seconds += step.seconds
        while (
            len(self._steps) > config.window_steps and self._seconds - self._steps[0].seconds >= config.window_seconds
        ):
            self._seconds -= self._steps.popleft().seconds
        if len(self._steps) < config.window_steps or self._seconds < config.window_seconds:
            return None
        compute = [each.compute_seconds for each in self._steps]
        half = len(compute) // 2
        # A shift that only the later half shows is still new: a plan made now would mix what was with what is.
        if not self._calibrates and min(_imbalance(compute[:half]), _imbalance(compute[half:])) <= config.threshold:
            return None
        self._calibrates = False
        total = _medians(compute)
        fixed = _medians([each.optimizer_seconds for each in self._steps])
        per_sample = [(each - own) / share for each, own, share in zip(total, fixed, self._shares, strict=True)]
        speeds = _balancing(per_sample, fixed, sum(self._shares))
        planned = round_shares(speeds, sum(self._shares), at_least=1)
        slowest = max(own + each * share for own, each, share in zip(fixed, per_sample, planned, strict=True))
        return speeds if slowest < (1 - config.gain) * max(total) else None


def _medians(by_step: Sequence[Sequence[float]]) -> list[float]:
    """Median over steps, by rank."""
    return [statistics.median(times) for times in zip(*by_step, strict=True)]


def _imbalance(compute: Sequence[Sequence[float]]) -> float:
    """By which part the rank furthest from the median rank differs from it, over some steps."""
    by_rank = _medians(compute)
    middle = statistics.median(by_rank)
    return max(abs(each / middle - 1) for each in by_rank)


def _balancing(per_sample: Sequence[float], fixed: Sequence[float], batch: int) -> tuple[float, ...]:
    """Speeds in samples/s, fixed time included, at which all ranks take equally long for their parts of the batch.

    All are done at T when rank r takes (T - fixed_r) / per_sample_r samples; a rank that is not done with its fixed
    part by then is given next to nothing.
    """
    rates = [1 / each for each in per_sample]
    together = (batch + sum(own * rate for own, rate in zip(fixed, rates, strict=True))) / sum(rates)
    return tuple(max((together - own) * rate, 1e-3) / together for own, rate in zip(fixed, rates, strict=True))


def with_speeds(cluster: Cluster, devices: Sequence[int], speeds: Sequence[float]) -> Cluster:
    """The cluster with the FLOP/s of the ranks' devices in proportion to the speeds that training found.

    Training tells how fast devices are relative to each other, so the median device keeps its figure.
    """
    factor = statistics.median(
        cluster.devices[device].profile.flops / speed for device, speed in zip(devices, speeds, strict=True)
    )
    found = dict(zip(devices, speeds, strict=True))
    return dataclasses.replace(
        cluster,
        devices=tuple(
            dataclasses.replace(device, profile=dataclasses.replace(device.profile, flops=factor * found[index]))
            if index in found
            else device
            for index, device in enumerate(cluster.devices)
        ),
    )
