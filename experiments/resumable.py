"""What the studies share: results that survive being stopped, and medians with spread."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Results:
    """A results.json beside a study: each entry is computed once and written at once."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "results.json"
        self.entries: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """The entry, computed if it is missing."""
        if key not in self.entries:
            self.entries[key] = compute()
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.entries, indent=1) + "\n")
            unfinished.replace(self._file)
        return self.entries[key]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`median [smallest, largest]`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def loss_at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Held-out loss at a time, by linear interpolation of a curve of (seconds, loss) that reaches it or nearly so."""
    times, losses = zip(*curve, strict=True)
    return float(np.interp(seconds, times, losses))
