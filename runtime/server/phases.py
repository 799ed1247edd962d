"""Brings a trial to lower precision in stages, and back by one where the loss does not bear it."""

import itertools
import logging
import math
import statistics
from collections import deque

from paceline.runtime.domain.events import StepDone
from paceline.runtime.domain.strategy import Strategy
from paceline.runtime.knobs import knob_space

DECAY = 0.9
"""Weight of the past in the smoothed loss, an exponential moving average over steps."""
SETTLED_STEPS = 5
"""Losses that the smoothed loss needs before it can be the best so far."""
SPIKE = 0.5
"""Part of a loss by which it may rise, or vary from step to step, and still count as stable."""
MARGIN = 0.02
"""The same as a part of the trial's first loss, for losses that come close to 0."""

logger = logging.getLogger(__name__)


def trouble(step: StepDone) -> str | None:
    """What makes a step one that lower precision may have spoilt, or None.

    A gradient that is not finite is no trouble while the loss scale can still be lowered.
    """
    if not math.isfinite(step.loss):
        return f"the training loss is {step.loss} at step {step.step}"
    if step.skipped and step.loss_scale <= 1:
        return f"the gradient is not finite at step {step.step}"
    return None


def stages(target: Strategy) -> tuple[Strategy, ...]:
    """What a strategy with `precision.phases` comes to in turn: without codec and in fp32; without codec; as it is.

    Those that equal the one before are left out. Raises IllegalStrategy where one is not legal.
    """
    if target["precision.phases"] == "off":
        return (target,)
    exchanged_plainly = _at_default(target, "compress.codec")
    return tuple(dict.fromkeys((_at_default(exchanged_plainly, "precision.compute"), exchanged_plainly, target)))


def _at_default(strategy: Strategy, name: str) -> Strategy:
    space = knob_space()
    values = {**strategy, name: space[name].default}
    in_use = {knob.name: values[knob.name] for knob in space.knobs if space.in_use(knob, values)}
    return space.strategy(in_use)


class PhaseWatch:
    """Sees every step of a trial and says which stage is due.

    By steps, a stage lasts `precision.phase_steps`. By stability, it ends when over its last `precision.phase_steps`
    the mean loss of the later half was not above that of the earlier half, and the noise, the root mean square of the
    differences between successive losses / sqrt(2), was at most half the later mean (plus `MARGIN`).

    A stage fails when a step is in `trouble`, or when the smoothed loss is above 1.5 times the best smoothed loss so
    far (plus `MARGIN`). The trial then goes back to the stage before, which lasts twice as long this time. Each stage
    may fail once; later on only `trouble` counts, and there is no way back from that. Whatever becomes of a spike, the
    smoothed loss begins anew after it, so that no other stage fails by it.
    """

    def __init__(self, target: Strategy, *, begun: int, step: int) -> None:
        """A trial of so many steps whose first stage began after `begun`. By steps, its stage follows from the two, so
        that a trial that goes on from a snapshot is in the stage in which the snapshot was taken."""
        self._stages = stages(target)
        self._by_steps = target["precision.phases"] == "steps"
        self._phase_steps = int(target["precision.phase_steps"])
        self._stage = min((step - begun) // self._phase_steps, self._last) if self._by_steps else 0
        self._begun = begun + self._stage * self._phase_steps if self._by_steps else step
        self._due, self._reason, self._entered = self._stage, "", True
        self._failed: set[int] = set()
        self._first: float | None = None
        self._settle_in(self._phase_steps)
        self._smooth_anew()

    @property
    def _last(self) -> int:
        return len(self._stages) - 1

    def _settle_in(self, length: int) -> None:
        self._length = length
        self._losses: deque[float] = deque(maxlen=length)

    def _smooth_anew(self) -> None:
        self._average, self._count, self._best = 0.0, 0, math.inf

    @property
    def ends_at(self) -> int | None:
        """Step after which the stage ends, where that is known beforehand."""
        return self._begun + self._length if self._by_steps and self._stage < self._last else None

    @property
    def due(self) -> bool:
        """Whether another stage is due."""
        return self._due != self._stage

    @property
    def falls_back(self) -> bool:
        """Whether that is the stage before."""
        return self._due < self._stage

    def turn(self) -> Strategy:
        """Go to the stage that is due; its strategy."""
        if self.due:
            level = logging.WARNING if self.falls_back else logging.INFO
            logger.log(
                level, "from stage %d to %d of %d: %s", self._stage + 1, self._due + 1, self._last + 1, self._reason
            )
            if self.falls_back:
                self._failed.add(self._stage)
            self._settle_in(self._phase_steps * (2 if self.falls_back else 1))
            self._stage, self._entered = self._due, False
        return self._stages[self._stage]

    def enter(self, step: int) -> None:
        """A generation with the stage's strategy takes over after so many steps."""
        if not self._entered:
            self._begun, self._entered = step, True

    def add(self, step: StepDone) -> bool:
        """Take a step; whether another stage is due."""
        if len(self._stages) > 1 and step.step > self._begun and not self.falls_back:
            wrong = trouble(step) or self._spike(step)
            if wrong:
                self._smooth_anew()
            if wrong and self._stage > 0 and self._stage not in self._failed:
                self._due, self._reason = self._stage - 1, wrong
            elif self._stage < self._last and self._is_over(step):
                self._due, self._reason = self._stage + 1, f"its time is over after step {step.step}"
        return self.due

    def _spike(self, step: StepDone) -> str | None:
        self._losses.append(step.loss)
        if self._first is None:
            self._first = abs(step.loss)
        self._average += (1 - DECAY) * (step.loss - self._average)
        self._count += 1
        smoothed = self._average / (1 - DECAY**self._count)
        allowed = self._best + self._rise(self._best)
        if self._count >= SETTLED_STEPS:
            self._best = min(self._best, smoothed)
        if smoothed <= allowed:
            return None
        return f"the training loss spikes at step {step.step}: smoothed it is {smoothed:.4g}, above {allowed:.4g}"

    def _rise(self, loss: float) -> float:
        return SPIKE * abs(loss) + MARGIN * (self._first or 0.0)

    def _is_over(self, step: StepDone) -> bool:
        if self._by_steps:
            return step.step >= self._begun + self._length
        if len(self._losses) < self._length:
            return False
        losses = list(self._losses)
        half = len(losses) // 2
        earlier, later = statistics.fmean(losses[:half]), statistics.fmean(losses[half:])
        noise = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in itertools.pairwise(losses)) / 2)
        return later <= earlier and noise <= self._rise(later)
