"""Progress of a trial on stderr, as its events pass by."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.runtime.domain.events import StepDone, TrialEvent, TrialStarted
from paceline.runtime.domain.trial import Budget


def followed(events: Iterable[TrialEvent], budget: Budget, *, title: str) -> Iterator[TrialEvent]:
    """Pass the events through and show how much of the budget is used."""
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting workers", total=1.0)
        seconds = 0.0
        for event in events:
            if isinstance(event, TrialStarted) and event.step > 0:
                progress.console.print(f"generation {event.generation} from step {event.step}")
            elif isinstance(event, StepDone):
                seconds += event.seconds
                by_steps = event.step / budget.steps if budget.steps else 0.0
                by_seconds = seconds / budget.seconds if budget.seconds else 0.0
                description = f"step {event.step}  loss {event.loss:.4f}"
                progress.update(task, completed=max(by_steps, by_seconds), description=description)
            yield event
