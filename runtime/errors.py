"""One root for every error that Paceline raises on purpose.

A message names the value, the rule and the nearest legal choice, in one line. `service.py` and `client.py` map the
classes to gRPC status codes and back, once per side; the command line prints the message and exits with 2.
"""

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Root of all errors a user of Paceline can meet."""


class InvalidRequest(PacelineError):
    """The request itself is wrong and would be wrong on any runtime (gRPC INVALID_ARGUMENT)."""


class UnknownName(InvalidRequest):
    """A name that nothing is registered under; the message proposes the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(options) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class IllegalStrategy(InvalidRequest):
    """A knob value outside its domain, or a combination that a plug-in's declaration forbids."""


class NotFound(PacelineError):
    """A trial or snapshot that this runtime does not hold (gRPC NOT_FOUND)."""


class Conflict(PacelineError):
    """The request cannot be met in the present state and changed nothing (gRPC FAILED_PRECONDITION)."""


class Busy(PacelineError):
    """A stated limit, for example of open streams or queued trials, is reached (gRPC RESOURCE_EXHAUSTED)."""


class Unreachable(PacelineError):
    """No Paceline server answers at the address within the deadline (gRPC UNAVAILABLE or DEADLINE_EXCEEDED)."""


class CorruptFile(PacelineError):
    """A file that is truncated, altered or not one of ours (gRPC DATA_LOSS)."""


class WorkerFailure(PacelineError):
    """Workers could not be started, or were lost faster than they could be replaced (gRPC ABORTED)."""
