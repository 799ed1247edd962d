"""Notice early that a strategy does not learn as the default does."""

from collections.abc import Sequence

from paceline.runtime.domain.trial import HeldOutPoint

LEAST_GAIN = 0.05
"""Part of its start loss that the reference trial must have gained before anything is judged by it."""
TOLERANCE = 0.1
"""How far a trial's loss may be above its start, as a part of what the reference has gained meanwhile."""


def divergence(curve: Sequence[HeldOutPoint], reference: Sequence[HeldOutPoint]) -> str | None:
    """What is wrong with the last point of a trial's held-out curve, in one line; None if it may go on.

    A trial has diverged when it is worse than untrained where the reference trial, after as many samples, has learnt
    something. Slow learning is no divergence: that is what statistical efficiency measures. Beyond its last evaluation
    the reference is taken to stay there.
    """
    if not curve or not reference:
        return None
    start, last = curve[0].loss, curve[-1]
    known = [point.loss for point in reference if point.samples <= last.samples]
    gained = start - min(known, default=start)
    if gained < LEAST_GAIN * start or last.loss <= start + TOLERANCE * gained:
        return None
    return (
        f"the held-out loss is {last.loss:.4g} after {last.samples} samples, above the {start:.4g} that it began with; "
        f"the reference trial had reached {start - gained:.4g} by then"
    )
