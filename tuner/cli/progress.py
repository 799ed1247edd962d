"""Progress on stderr."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.runtime.api import RuntimeAPI
from paceline.runtime.domain.events import StepDone, TrialEvent, TrialFailed, TrialFinished, TrialStarted
from paceline.runtime.domain.trial import TrialResult, TrialSpec
from paceline.runtime.errors import WorkerFailure


def progress_bar(title: str) -> Progress:
    """A bar with a title on its left, the task's description and the elapsed time on its right."""
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def watch(
    runtime: RuntimeAPI, spec: TrialSpec, log_event: Callable[[TrialEvent], None] = lambda event: None
) -> TrialResult:
    """Run a trial to its end, show how much of its budget is used, and pass on each event."""
    budget = spec.budget
    with progress_bar(spec.workload) as progress:
        task = progress.add_task("starting", total=1.0)
        first_step: int | None = None
        seconds = 0.0
        for event in runtime.run_trial(spec):
            log_event(event)
            if isinstance(event, TrialStarted) and first_step is None:
                first_step = event.step
            elif isinstance(event, TrialStarted):
                progress.console.print(f"generation {event.generation} from step {event.step}")
            elif isinstance(event, StepDone):
                seconds += event.seconds
                by_steps = (event.step - (first_step or 0)) / budget.steps if budget.steps else 0.0
                by_seconds = seconds / budget.seconds if budget.seconds else 0.0
                description = f"step {event.step}  loss {event.loss:.4f}"
                progress.update(task, completed=max(by_steps, by_seconds), description=description)
            elif isinstance(event, TrialFinished | TrialFailed):
                return event.result
    raise WorkerFailure("the runtime ended the event stream of a trial without a result")
