"""Run by `check` as a script of its own: computes inside a device's cgroups and says how much of a core it got.

Arguments: the members files of the cgroups, then seconds. Prints `ready`, waits for a line, then prints CPU seconds per
second.
"""

import sys
import time
from pathlib import Path


def main() -> None:
    """Join, wait, compute, report."""
    *members_files, seconds = sys.argv[1:]
    for file in members_files:
        Path(file).write_text("0")
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < float(seconds):
        sum(range(1000))
    print((time.process_time() - cpu) / (time.monotonic() - began))


if __name__ == "__main__":
    main()
