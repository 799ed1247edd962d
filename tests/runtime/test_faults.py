"""Scripted faults at exact places: what a killed, frozen or mistaken rank may cost, and what it may not."""

from collections.abc import Callable, Iterator

import pytest

from paceline.runtime.domain.events import Evaluated, SnapshotTaken, StepDone, TrialEvent, TrialStarted
from paceline.runtime.domain.trial import TrialSpec
from paceline.runtime.embedded import EmbeddedRuntime
from paceline.runtime.errors import Conflict
from paceline.runtime.launch.base import WorkerAddress
from paceline.runtime.server import fleet, generations
from paceline.runtime.server.fleet import Worker, WorkerError, WorkerLost
from paceline.runtime.server.generations import Generations
from paceline.runtime.server.record import Request
from paceline.runtime.server.trial_runner import TrialRunner
from paceline.runtime.sync import SYNC_MODES
from tests.runtime.support import (
    OnEvent,
    Settings,
    Switching,
    assert_every_sample_once,
    digests,
    last_snapshot,
    result_of,
    run,
    spec_for,
)

Inject = Callable[..., None]

STEPS = 7
MODES = SYNC_MODES.names()
PHASES = ("forward", "backward", "optimizer")
EXACT = [mode for mode in MODES if SYNC_MODES.get(mode).replicas_equal]


def settings_of(embedded: EmbeddedRuntime, mode: str) -> Settings:
    """A mode with a sync point after steps 3 and 6, where it has such a thing."""
    users = embedded.describe_knobs()["sync.period"].requires
    assert users is not None
    return {"sync.mode": mode} | ({"sync.period": 3} if mode in users.values else {})


def spec_of(embedded: EmbeddedRuntime, mode: str, **fields: object) -> TrialSpec:
    """Seven steps of plain SGD, with evaluations after steps 4 and 7."""
    fields = {"workload": "regression/sgd", "evaluations": 2, **fields}
    return spec_for(embedded, settings_of(embedded, mode), steps=STEPS, **fields)


Weights = Callable[[str], list[str]]


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


def workers_started(embedded: EmbeddedRuntime) -> int:
    return embedded._runtime._fleet._incarnations


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
    assert second.step == (4 if mode in EXACT else 3)
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


LOCAL: Settings = {"sync.mode": "local_sgd", "sync.period": 3}
SWITCHES: list[tuple[Settings, Settings]] = [
    ({}, {"sync.bucket_mb": 1.0}),
    ({}, {"mapping.order": "3,1,0,2"}),
    ({}, LOCAL),
    (LOCAL, {**LOCAL, "sync.period": 2}),
    (LOCAL, {}),
    (LOCAL, {**LOCAL, "mapping.order": "3,1,0,2"}),
]


def switched_spec(embedded: EmbeddedRuntime, before: Settings, **fields: object) -> TrialSpec:
    """Seven steps of plain SGD with a barrier after each."""
    return spec_for(embedded, before, steps=STEPS, workload="regression/sgd", evaluations=STEPS, **fields)


@pytest.mark.parametrize("after", [3, 4])
@pytest.mark.parametrize(("before", "settings"), SWITCHES)
def test_rank_killed_while_a_live_switch_is_established(
    embedded: EmbeddedRuntime,
    on_event: OnEvent,
    monkeypatch: pytest.MonkeyPatch,
    before: Settings,
    settings: Settings,
    after: int,
) -> None:
    switching, killed = Switching(embedded, on_event), list[Worker]()
    plan = Generations.plan

    def plan_and_kill(self: Generations, workers: tuple[Worker, ...]) -> object:
        if switching.requests and not killed:
            killed.append(workers[1])
            self.fleet.fence(workers[1])
        return plan(self, workers)

    monkeypatch.setattr(Generations, "plan", plan_and_kill)
    spec = switched_spec(embedded, before)
    events = switching.run(spec, {after: settings})
    assert killed
    assert result_of(events).failure is None
    assert_every_sample_once(events, global_batch=13, steps=STEPS)
    first, *others = [event for event in events if isinstance(event, TrialStarted)]
    new = [event for event in others if event.strategy != first.strategy]
    (answer,) = switching.answers
    assert answer in [event.generation for event in new]
    # The switch took place at the last state that all ranks agreed on, without a trace of what came after it.
    expected = switching.run(spec, {min(event.step for event in new): settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")


@pytest.mark.parametrize("settings", [{**LOCAL, "sync.period": 2}, {**LOCAL, "mapping.order": "3,1,0,2"}])
def test_rank_killed_between_a_switch_and_the_next_sync_point(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, settings: Settings
) -> None:
    switching, spec = Switching(embedded, on_event), switched_spec(embedded, LOCAL)
    inject(step=5, position=5, phase="forward")
    events = switching.run(spec, {4: settings})
    # Step 4 was done before the switch, and what the dead rank learnt in it was shared with nobody.
    assert [event.step for event in events if isinstance(event, TrialStarted)] == [0, 4, 3]
    expected = switching.run(spec, {3: settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=STEPS)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("before", "settings"), [({}, {"sync.bucket_mb": 1.0}), (LOCAL, {})])
def test_rank_killed_while_it_prepares_for_a_switch(
    embedded: EmbeddedRuntime,
    on_event: OnEvent,
    inject: Inject,
    before: Settings,
    settings: Settings,
    phase: str,
) -> None:
    switching = Switching(embedded, on_event)
    # Wrapping the model in DDP computes the next step's loss once before the step.
    spec = switched_spec(embedded, before)
    expected = switching.run(spec, {3: settings})
    inject(step=4, position=5, phase=phase)
    events = switching.run(spec, {3: settings})
    assert digests(last_snapshot(events), "model") == digests(last_snapshot(expected), "model")
    assert_every_sample_once(events, global_batch=13, steps=STEPS)


def test_switch_that_no_attempt_can_establish_is_refused(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    switching = Switching(embedded, on_event)
    plan = Generations.plan

    def plan_and_inject(self: Generations, workers: tuple[Worker, ...]) -> object:
        if switching.requests:
            inject(step=5, position=5, phase="forward")
        return plan(self, workers)

    monkeypatch.setattr(Generations, "plan", plan_and_inject)
    result = result_of(switching.run(switched_spec(embedded, {}), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "worker_lost"
    assert "no generation came about in 5 attempts" in result.message
    assert [type(answer) for answer in switching.answers] == [Conflict]
    assert result.strategy == embedded.describe_knobs().default


def test_switch_that_loses_a_worker_is_refused_where_the_trial_is_to_end_then(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject
) -> None:
    switching = Switching(embedded, on_event)
    inject(step=5, position=5, phase="backward")
    result = result_of(switching.run(switched_spec(embedded, {}, on_worker_lost="fail"), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "worker_lost"
    assert [type(answer) for answer in switching.answers] == [Conflict]
    assert result.strategy == embedded.describe_knobs().default


def test_switch_to_which_the_workload_objects_is_refused(
    embedded: EmbeddedRuntime, on_event: OnEvent, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "LOSS_SECONDS", 0.1)
    switching = Switching(embedded, on_event)
    inject(step=5, position=5, phase="forward", action="ValueError")
    result = result_of(switching.run(switched_spec(embedded, {}), {4: {"sync.bucket_mb": 1.0}}))
    assert result.failure == "error"
    assert [type(answer) for answer in switching.answers] == [Conflict]


@pytest.mark.parametrize(("lost", "done"), [("replace", True), ("fail", False)])
@pytest.mark.parametrize("mode", MODES)
def test_switch_asked_for_while_the_trial_recovers_is_done_afterwards_or_refused(
    embedded: EmbeddedRuntime, inject: Inject, monkeypatch: pytest.MonkeyPatch, mode: str, lost: str, done: bool
) -> None:
    strategy = embedded.describe_knobs().strategy({**settings_of(embedded, mode), "compress.codec": "bf16"})
    requests = []
    recover = TrialRunner._recover

    async def ask_and_recover(self: TrialRunner, error: WorkerLost | WorkerError) -> None:
        request = Request(strategy=strategy, done=embedded._loop.create_future())
        requests.append(request)
        self.requests.put_nowait(request)
        self.stop_soon()
        await recover(self, error)

    monkeypatch.setattr(TrialRunner, "_recover", ask_and_recover)
    inject(step=2, position=5, phase="forward")
    events = run(embedded, spec_of(embedded, mode, on_worker_lost=lost))
    (request,) = requests
    if done:
        switched = [event for event in events if isinstance(event, TrialStarted)][-1]
        assert (switched.generation, switched.strategy) == (request.done.result(), strategy)
        assert result_of(events).strategy == strategy
        assert_every_sample_once(events, global_batch=13, steps=STEPS)
    else:
        assert isinstance(request.done.exception(), Conflict)
        assert result_of(events).failure == "worker_lost"


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
