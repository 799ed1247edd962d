"""Makes a trial's timed changes of the cluster, and undoes them when the trial ends."""

import asyncio
from collections.abc import Sequence

from paceline.runtime.domain.trial import TimedChange
from paceline.runtime.launch.base import Launcher


class Timeline:
    """The changes of one trial."""

    def __init__(self, changes: Sequence[TimedChange], launcher: Launcher) -> None:
        self._launcher = launcher
        self._changes = changes
        self._by_step = sorted((change.step, change.change) for change in changes if change.step is not None)
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """The first step begins now. Further calls have no effect."""
        if self._changes and not self._tasks:
            timed = [(change.seconds, change.change) for change in self._changes if change.seconds is not None]
            self._tasks = [asyncio.create_task(self._later(seconds, change)) for seconds, change in timed]

    async def _later(self, seconds: float, change: str) -> None:
        await asyncio.sleep(seconds)
        await self._launcher.change([change])

    def reach(self, step: int) -> None:
        """So many steps of the trial are done. A step that is done again after a recovery changes nothing twice."""
        while self._by_step and self._by_step[0][0] <= step:
            _, change = self._by_step.pop(0)
            self._tasks.append(asyncio.create_task(self._launcher.change([change])))

    async def end(self) -> None:
        """Undo everything. Raises what a change raised, which nobody has seen yet."""
        if not self._changes:
            return
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launcher.restore()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
