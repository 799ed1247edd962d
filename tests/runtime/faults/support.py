"""The trial that faults happen to."""

from collections.abc import Callable

from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.sync import SYNC_MODES
from tests.runtime.support import (
    Settings,
    spec_for,
)

Inject = Callable[..., None]
Weights = Callable[[str], list[str]]

STEPS = 7
MODES = SYNC_MODES.names()
PHASES = ("forward", "backward", "optimizer")
PERIODIC = [mode for mode in MODES if SYNC_MODES.get(mode).lockstep and not SYNC_MODES.get(mode).replicas_equal]
"""Modes that go on from the last averaging; the others from the last step, or from the last barrier."""


def settings_of(embedded: EmbeddedRuntime, mode: str) -> Settings:
    """A mode with a sync point after steps 3 and 6, where it has such a thing."""
    special: dict[str, Settings] = {"async": {"sync.staleness": 0}, **{name: {"sync.period": 3} for name in PERIODIC}}
    return {"sync.mode": mode, **special.get(mode, {})}


def spec_of(embedded: EmbeddedRuntime, mode: str, **fields: object) -> TrialSpec:
    """Seven steps of plain SGD, with evaluations after steps 4 and 7."""
    fields = {"workload": "regression/sgd", "evaluations": 2, **fields}
    return spec_for(embedded, settings_of(embedded, mode), steps=STEPS, **fields)


def workers_started(embedded: EmbeddedRuntime) -> int:
    return embedded._runtime._fleet._incarnations
