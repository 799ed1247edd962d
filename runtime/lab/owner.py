"""Names that tell which process a namespace, link or cgroup belongs to, also after that process has died."""

import itertools
import os
import re
from pathlib import Path

_OWNER = re.compile(r"paceline-(\d+)-(\d+)-\d+")
_counter = itertools.count()


def new_owner() -> str:
    """A name for the next lab of this process: its pid, its start time in clock ticks, and a number."""
    return f"paceline-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_counter)}"


def owner_of(name: str) -> str | None:
    """The owner that the name of one of our things begins with; None for what is not ours."""
    found = _OWNER.match(name)
    return found[0] if found else None


def is_dead(owner: str) -> bool:
    """Whether the owning process has ended; its pid may have gone to another one."""
    found = _OWNER.fullmatch(owner)
    assert found is not None
    return _start_ticks(int(found[1])) != int(found[2])


def _start_ticks(pid: int) -> int | None:
    try:
        # The command's name, in parentheses, may hold spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19])
