"""Amounts as people write them: `400 Mbit/s`, `512 MiB`, `0.2` cores."""

import difflib
import math
import re
from collections.abc import Mapping

RATE_UNITS = {"kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "kB/s": 1e3, "MB/s": 1e6}
"""Unit -> B/s."""
MEMORY_UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
"""Unit -> B."""
RATE_RANGE = (12_500.0, 2.5e9)
"""100 kbit/s to 20 Gbit/s: below it one packet takes a tenth of a second, above it 32 bits of B/s are soon full."""
MEMORY_RANGE = (2.0**24, 2.0**50)
MIN_SPEED = 0.01


def parse_rate(text: object) -> float:
    """`400 Mbit/s` in B/s. Raises ValueError."""
    return _parse("rate", text, RATE_UNITS, RATE_RANGE, "400 Mbit/s")


def parse_memory(text: object) -> int:
    """`512 MiB` in B. Raises ValueError."""
    return int(_parse("memory", text, MEMORY_UNITS, MEMORY_RANGE, "512 MiB"))


def parse_speed(text: object) -> float:
    """A number of CPU cores. Raises ValueError."""
    try:
        speed = math.nan if isinstance(text, bool) else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        speed = math.nan
    if not MIN_SPEED <= speed < math.inf:
        raise ValueError(f"speed {text!r} must be a number of CPU cores, {MIN_SPEED:g} or more; for example 0.2")
    return speed


def _parse(kind: str, text: object, units: Mapping[str, float], legal: tuple[float, float], example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(\S+)", text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{kind} {text!r} must be a number and a unit; for example {example!r}")
    number, unit = found.groups()
    if unit not in units:
        # People get the letters right and their case wrong.
        near = difflib.get_close_matches(unit.lower(), [known.lower() for known in units], n=1, cutoff=0.5)
        nearest = [f"{number} {known}" for known in units if known.lower() in near]
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"units: {', '.join(units)}"
        raise ValueError(f"{kind} {text!r} has the unknown unit {unit!r}; {hint}")
    value = float(number) * units[unit]
    low, high = (f"{bound / units[unit]:g} {unit}" for bound in legal)
    if not legal[0] <= value <= legal[1]:
        raise ValueError(f"{kind} {text!r} must lie between {low} and {high}")
    return value
