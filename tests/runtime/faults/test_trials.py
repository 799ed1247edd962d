"""Scripted faults at exact places: what a killed, frozen or mistaken rank may cost, and what it may not."""

import pytest

from paceline.runtime.domain.events import Evaluated, SnapshotTaken, StepDone, TrialEvent, TrialStarted
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.launch.base import WorkerAddress
from paceline.runtime.server import fleet, generations
from paceline.runtime.server.fleet import Worker
from paceline.runtime.server.trial_runner import TrialRunner
from tests.runtime.faults.support import (
    MODES,
    PERIODIC,
    PHASES,
    STEPS,
    Inject,
    Weights,
    settings_of,
    spec_of,
    workers_started,
)
from tests.runtime.support import (
    OnEvent,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
)


@pytest.mark.parametrize("position", [0, 5, 12], ids=["first", "middle", "last"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [1, 4, STEPS])
@pytest.mark.parametrize("mode", MODES)
def test_killed_rank_changes_no_bit_and_no_sample(
    embedded: EmbeddedRuntime, undisturbed: Weights, inject: Inject, mode: str, step: int, phase: str, position: int
) -> None:
    expected, before = undisturbed(mode), workers_started(embedded)
    inject(step=step, position=position, phase=phase)
    events = run(embedded, spec_of(embedded, mode))
    assert result_of(events).failure is None
    assert digests(last_snapshot(events), "model") == expected
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    assert workers_started(embedded) == before + 1


@pytest.mark.parametrize("mode", MODES)
def test_recovery_is_another_generation_from_the_last_agreed_step(
    embedded: EmbeddedRuntime, inject: Inject, mode: str
) -> None:
    inject(step=5, phase="forward")
    events = run(embedded, spec_of(embedded, mode))
    first, second = [event for event in events if isinstance(event, TrialStarted)]
    assert second.generation > first.generation
    assert second.step == (3 if mode in PERIODIC else 4)
    assert second.strategy == first.strategy
    assert result_of(events).generations == 2
    assert (result_of(events).steps, result_of(events).samples) == (STEPS, STEPS * 13)
    assert [point.samples for point in result_of(events).heldout_curve] == [0, 4 * 13, STEPS * 13]


def test_recovery_goes_on_across_the_end_of_an_epoch(embedded: EmbeddedRuntime, inject: Inject) -> None:
    expected = run(embedded, spec_for(embedded, {}, steps=20, workload="regression/sgd"))
    inject(step=7, position=5, phase="backward")
    events = run(embedded, spec_for(embedded, {}, steps=20, workload="regression/sgd"))
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=20)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_lost_worker_ends_the_trial_where_that_is_asked_for(
    embedded: EmbeddedRuntime, inject: Inject, mode: str, step: int, phase: str
) -> None:
    inject(step=step, position=5, phase=phase)
    result = result_of(run(embedded, spec_of(embedded, mode, on_worker_lost="fail")))
    assert result.failure == "worker_lost"
    assert "lost" in result.message


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_killed_at_once(
    embedded: EmbeddedRuntime, undisturbed: Weights, inject: Inject, mode: str, phase: str
) -> None:
    expected, before = undisturbed(mode), workers_started(embedded)
    inject(step=5, position=5, phase=phase, action="SIGKILL two")
    events = run(embedded, spec_of(embedded, mode))
    assert digests(last_snapshot(events), "model") == expected
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    assert workers_started(embedded) == before + 2


@pytest.mark.parametrize(("every", "restored"), [(4, 4), (8, 0)], ids=["snapshot", "seed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_killed_falls_back_to_the_newest_snapshot_or_the_seed(
    embedded: EmbeddedRuntime, inject: Inject, mode: str, phase: str, every: int, restored: int
) -> None:
    spec = spec_for(embedded, settings_of(embedded, mode), steps=8, workload="regression/sgd", snapshot_every=every)
    expected, before = run(embedded, spec), workers_started(embedded)
    inject(step=6, phase=phase, action="SIGKILL all")
    events = run(embedded, spec)
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, restored]
    assert workers_started(embedded) == before + 4
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=8)


@pytest.mark.parametrize("mode", MODES)
def test_rank_killed_right_after_a_snapshot_was_restored(
    embedded: EmbeddedRuntime, inject: Inject, on_event: OnEvent, mode: str
) -> None:
    spec = spec_for(embedded, settings_of(embedded, mode), steps=8, workload="regression/sgd", snapshot_every=4)
    expected = run(embedded, spec)

    def kill_again(runner: TrialRunner, event: TrialEvent) -> None:
        if isinstance(event, TrialStarted) and event.step == 4 and runner.record.generations == 2:
            inject(step=5, position=5, phase="optimizer")

    on_event(kill_again)
    inject(step=6, phase="forward", action="SIGKILL all")
    events = run(embedded, spec)
    assert result_of(events).generations == 3
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=8)


@pytest.mark.parametrize("moment", [StepDone, Evaluated, SnapshotTaken])
@pytest.mark.parametrize("mode", MODES)
def test_rank_killed_while_the_job_stands_at_a_barrier(
    embedded: EmbeddedRuntime, on_event: OnEvent, mode: str, moment: type[TrialEvent]
) -> None:
    spec = spec_for(embedded, settings_of(embedded, mode), steps=8, workload="regression/sgd", snapshot_every=4)
    expected, killed = run(embedded, spec), list[Worker]()

    def kill(runner: TrialRunner, event: TrialEvent) -> None:
        if not killed and isinstance(event, moment) and runner.step == 4:
            killed.append(runner.generation.workers[2])
            embedded._runtime._fleet.fence(runner.generation.workers[2])

    on_event(kill)
    events = run(embedded, spec)
    assert killed
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=8)


@pytest.mark.parametrize("mode", MODES)
def test_rank_after_rank_killed_throughout_a_trial(embedded: EmbeddedRuntime, on_event: OnEvent, mode: str) -> None:
    spec = spec_for(embedded, settings_of(embedded, mode), steps=100, workload="regression/sgd")
    expected, killed = run(embedded, spec), list[int]()

    def kill(runner: TrialRunner, event: TrialEvent) -> None:
        if isinstance(event, StepDone) and event.step // 20 > len(killed):
            killed.append(event.step)
            embedded._runtime._fleet.fence(runner.generation.workers[len(killed) % 4])

    on_event(kill)
    events = run(embedded, spec)
    assert result_of(events).generations > 3
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=100)


def test_replacement_killed_before_it_attaches(
    embedded: EmbeddedRuntime, undisturbed: Weights, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, before, launcher = undisturbed("allreduce"), workers_started(embedded), embedded._runtime.launcher
    launch, killed = launcher.launch, list[WorkerAddress]()

    async def launch_and_kill(worker: WorkerAddress) -> None:
        await launch(worker)
        if not killed:
            killed.append(worker)
            launcher.kill(worker.device, worker.incarnation)

    monkeypatch.setattr(launcher, "launch", launch_and_kill)
    inject(step=5, position=5, phase="forward")
    events = run(embedded, spec_of(embedded, "allreduce"))
    assert digests(last_snapshot(events), "model") == expected
    assert workers_started(embedded) == before + 2


def test_ranks_that_wait_for_a_stalled_one_get_out_of_the_collective(
    embedded: EmbeddedRuntime, undisturbed: Weights, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "ABORT_SECONDS", 3.0)
    expected, before = undisturbed("allreduce"), workers_started(embedded)
    inject(step=5, position=5, phase="forward", action="SIGKILL another and stall")
    events = run(embedded, spec_of(embedded, "allreduce"))
    assert digests(last_snapshot(events), "model") == expected
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    # The killed one and the stalled one, but not the two that waited for it.
    assert workers_started(embedded) == before + 2


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
@pytest.mark.parametrize("mode", MODES)
def test_frozen_rank_is_killed_and_replaced(
    embedded: EmbeddedRuntime,
    undisturbed: Weights,
    inject: Inject,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    phase: str,
) -> None:
    monkeypatch.setattr(fleet, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(fleet, "WATCH_SECONDS", 0.2)
    expected, before = undisturbed(mode), workers_started(embedded)
    inject(step=5, position=5, phase=phase, action="SIGSTOP")
    events = run(embedded, spec_of(embedded, mode))
    assert digests(last_snapshot(events), "model") == expected
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    assert workers_started(embedded) > before


@pytest.mark.parametrize(
    ("action", "failure", "message"),
    [
        ("ValueError", "error", "ValueError: a mistake in the user's loss"),
        ("MemoryError", "oom", "MemoryError: no memory for the test"),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_mistake_in_the_workload_ends_the_trial_with_its_label(
    embedded: EmbeddedRuntime,
    inject: Inject,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    step: int,
    phase: str,
    action: str,
    failure: str,
    message: str,
) -> None:
    monkeypatch.setattr(generations, "LOSS_SECONDS", 0.1)
    before = workers_started(embedded)
    inject(step=step, position=5, phase=phase, action=action)
    result = result_of(run(embedded, spec_of(embedded, mode)))
    assert result.failure == failure
    assert result.message.endswith(message)
    assert "\n" not in result.message
    # Nobody was at fault but the workload: the ranks that waited for the mistaken one in a collective live on.
    run(embedded, spec_of(embedded, mode))
    assert workers_started(embedded) == before


@pytest.mark.parametrize("step", [2, STEPS])
@pytest.mark.parametrize("mode", MODES)
def test_loss_that_is_no_number_ends_the_trial_as_diverged(
    embedded: EmbeddedRuntime, inject: Inject, mode: str, step: int
) -> None:
    inject(step=step, position=5, phase="nan", action="")
    result = result_of(run(embedded, spec_of(embedded, mode)))
    assert (result.failure, result.message) == ("diverged", f"the training loss is nan at step {step}")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES)
def test_buffers_are_as_if_the_lost_step_had_not_begun(
    embedded: EmbeddedRuntime, inject: Inject, mode: str, phase: str
) -> None:
    spec = spec_for(embedded, settings_of(embedded, mode), steps=STEPS, workload="regression/norm")
    expected = digests(last_snapshot(run(embedded, spec)), "model")
    # The buffers of rank 0 are the ones that count.
    inject(step=5, position=12, phase=phase)
    assert digests(last_snapshot(run(embedded, spec)), "model") == expected
