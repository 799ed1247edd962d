"""Trials, switches and recoveries leave nothing behind in a worker that lives through all of them."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline.runtime.domain.domains import KnobValue
from paceline.runtime.embedded import EmbeddedRuntime
from tests.runtime.support import result_of, spec_for


def gloo_threads(pid: int) -> int:
    """Threads of process groups. A group that is not destroyed keeps its threads, its sockets and all it refers to."""
    names = [(task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum("gloo" in name for name in names)


def workers() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.ppid() != psutil.Process().pid}


def test_ranks_that_sat_out_a_smaller_trial_come_back(embedded: EmbeddedRuntime) -> None:
    """The others have left the group that these still know."""
    for world_size in (4, 2, 4, 3, 2, 4):
        result = result_of(list(embedded.run_trial(spec_for(embedded, {}, steps=3, world_size=world_size))))
        assert result.failure is None, result.message


@pytest.mark.parametrize(
    "settings",
    [
        {"sync.mode": "allreduce"},
        {"sync.mode": "local_sgd", "sync.period": 2},
        {"sync.mode": "diloco", "sync.period": 3, "sync.fragments": 2, "sync.delay": 1},
        {"sync.mode": "local_sgd", "sync.period": 2, "sync.inner": "tier"},
    ],
)
def test_workers_keep_one_process_group(
    embedded: EmbeddedRuntime, inject: Callable[..., None], settings: dict[str, KnobValue]
) -> None:
    spec = spec_for(embedded, settings, steps=5)
    assert result_of(list(embedded.run_trial(spec))).failure is None
    before = {pid: gloo_threads(pid) for pid in workers()}
    for order in ("0,1,2,3", "3,2,1,0"):
        for _ in range(2):
            inject(step=3, phase="backward")
            events = list(embedded.run_trial(spec_for(embedded, {**settings, "mapping.order": order}, steps=5)))
            assert result_of(events).failure is None
    after = {pid: gloo_threads(pid) for pid in workers() & set(before)}
    assert after
    assert all(count <= before[pid] for pid, count in after.items())
