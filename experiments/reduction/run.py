"""An all-reduce of eight nodes: by four reducers on faster links, as a ring, and by the nodes for each other.

    python -m experiments.reduction.run        (as root)

The bound is what a node's line rate allows: it has to send its bucket once and receive the sum once, both at a time.
"""

import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.in_lab import Way, key, take_times
from experiments.resumable import spread, table
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.exchange import ReductionClient, StepMeter, Tiers, make_plan, reduce_for
from paceline.runtime.knobs import NoKnobs
from paceline.runtime.lab import file
from paceline.runtime.membership import Membership

HERE = Path(__file__).parent
LAB = str(HERE / "fat-reducers.yaml")
RANKS = 8
SIZES_MB = (4, 16)
"""MB of fp32, 10^6 bytes each."""
ROUNDS = 7
CHUNK_MB = 0.25
NAMES = ("four reducers", "ring", "reducers beside the ranks")


def prepare(lab_file: file.LabFile, store: dist.Store) -> dict[str, Way]:
    """The three ways; processes behind the ranks are the reducers."""
    links = dist.group.WORLD
    assert links is not None
    group = dist.new_group(range(RANKS))
    codec, chunk_bytes = NoCodec(NoKnobs()), int(CHUNK_MB * 2**20)
    if links.rank() >= RANKS:
        ways = [lambda _: reduce_for(codec, links, RANKS, chunk_bytes=chunk_bytes), lambda _: None, lambda _: None]
        return dict(zip(NAMES, ways, strict=True))
    membership = Membership(
        generation=1, group=group, shares=(1,) * RANKS, store=store, links=links, subgroup=dist.new_group
    )
    client = ReductionClient(codec, membership, chunk_bytes=chunk_bytes)
    beside = Tiers(codec, group, (), make_plan((), group.rank(), RANKS), chunk_bytes=chunk_bytes)

    def through_reducers(tensor: torch.Tensor) -> None:
        client.start(tensor, (), None, StepMeter()).wait()
        client.end()

    ways = [
        through_reducers,
        lambda tensor: dist.all_reduce(tensor, group=group),
        lambda tensor: beside.start(tensor, (), None, StepMeter()).wait(),
    ]
    return dict(zip(NAMES, ways, strict=True))


def main() -> None:
    """Measure and write the table."""
    take_times(LAB, prepare, ranks=RANKS, sizes_mb=SIZES_MB, rounds=ROUNDS, folder=HERE)
    entries: dict[str, float] = json.loads((HERE / "results.json").read_text())
    nodes = file.load(LAB).nodes
    rate, reducer_rate = nodes[0].link.up, nodes[-1].link.up
    rows = []
    for size in SIZES_MB:
        times = {name: [entries[key(size, name, turn)] for turn in range(ROUNDS)] for name in NAMES}
        ring = statistics.median(times["ring"])
        rows.append([f"{size} MB", "a node's link at line rate", f"{size * 1e6 / rate:.3f}", ""])
        rows += [
            [f"{size} MB", name, spread(each), f"{statistics.median(each) / ring:.2f}"] for name, each in times.items()
        ]
    text = (
        f"Median [smallest, largest] of {ROUNDS} alternating rounds, s; {RANKS} ranks at {rate * 8e-6:g} Mbit/s, "
        f"four reducers at {reducer_rate * 8e-6:g} Mbit/s, chunks of {CHUNK_MB} MiB.\n\n"
    )
    text += table(["all-reduce of", "how", "seconds", "of the ring's time"], rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
