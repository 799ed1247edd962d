"""The step gate: which step a rank may begin, and how all ranks come to stop before the same one."""

import threading


class StepGate:
    """Shared by the training thread, which asks before each step, and the control thread, which sets limits.

    To stop everywhere at one step the server first holds all ranks: each freezes before the first step it has not
    begun and names it. Then it lets all of them run to the largest of these. A rank that is already inside a step
    finds its peers in the same one, so nobody waits for a rank that stands still.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._until = 0
        self._held = False

    def open(self, step: int, until: int) -> None:
        """Training starts: `step` steps are done, and none after `until` may begin."""
        with self._changed:
            self._begun = step
            self._until = until
            self._held = False

    def may_begin(self, step: int) -> bool:
        """Ask to begin a step, or to go on with it. Waits while held; False: stand still at the barrier."""
        with self._changed:
            while self._held:
                self._changed.wait()
            if step > self._until:
                return False
            self._begun = max(self._begun, step)
            return True

    @property
    def until(self) -> int:
        """The step at whose end all ranks stand still, once `may_begin` has said so."""
        with self._changed:
            return self._until

    def hold(self) -> int:
        """Freeze before the next step not begun; returns the last that was begun."""
        with self._changed:
            self._held = True
            return self._begun

    def run_until(self, step: int) -> None:
        """Release a hold, but begin no step after `step`."""
        with self._changed:
            self._until = step
            self._held = False
            self._changed.notify_all()

    def close(self) -> None:
        """Begin no further step."""
        self.run_until(0)
