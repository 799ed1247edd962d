"""After every fault the runtime still works, and trains what it always has."""

from collections.abc import Iterator

import pytest

from paceline.runtime.embedded import EmbeddedRuntime
from tests.runtime.faults.support import Weights, spec_of
from tests.runtime.support import (
    digests,
    last_snapshot,
    run,
)


@pytest.fixture(scope="module")
def undisturbed(embedded: EmbeddedRuntime) -> Weights:
    """Digests of the final weights of a mode's trial that nothing happens to."""
    known: dict[str, list[str]] = {}

    def weights(mode: str) -> list[str]:
        if mode not in known:
            known[mode] = digests(last_snapshot(run(embedded, spec_of(embedded, mode))), "model")
        return known[mode]

    return weights


@pytest.fixture(autouse=True)
def next_trial_works(embedded: EmbeddedRuntime, undisturbed: Weights) -> Iterator[None]:
    """Whatever a test did to the runtime."""
    yield
    events = run(embedded, spec_of(embedded, "allreduce"))
    assert digests(last_snapshot(events), "model") == undisturbed("allreduce")
