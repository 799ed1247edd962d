"""An all-reduce between two racks: hierarchical, as a ring in the best order, and as a ring in random orders.

    python -m experiments.hcom.run        (as root)

The lab `two-racks` is built, and one process per device enters its node under its CPU quota. The bound is what the
uplink's line rate allows: with two racks, every byte of the result has to leave each of them once.
"""

import json
import random
import statistics
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from experiments.in_lab import Way, key, take_times
from experiments.resumable import spread, table
from paceline.runtime.compress.none import NoCodec
from paceline.runtime.exchange import StepMeter, Tiers, make_plan
from paceline.runtime.knobs import NoKnobs
from paceline.runtime.lab import file
from paceline.runtime.mapping.levels import Level

HERE = Path(__file__).parent
LAB = "two-racks"
SIZES_MB = (4, 16)
"""MB of fp32, 10^6 bytes each."""
ROUNDS = 7
RANDOM_ORDERS = 10
CHUNK_MB = 0.5
TIMEOUT = timedelta(minutes=2)


def orders(racks: list[str]) -> dict[str, list[int]]:
    """Rank order of each ring: the devices of a rack next to each other, and random ones."""
    devices = range(len(racks))
    best = sorted(devices, key=lambda device: racks[device])
    shuffled = random.Random(0)
    return {
        "ring, topology order": best,
        **{f"ring, random order {index}": shuffled.sample(devices, len(racks)) for index in range(RANDOM_ORDERS)},
    }


def prepare(lab_file: file.LabFile, store: dist.Store) -> dict[str, Way]:
    """The hierarchical exchange, and a process group for each ring."""
    group = dist.group.WORLD
    assert group is not None
    rank, racks = group.rank(), _racks(lab_file)
    tiers = (Level(name="rack", groups=tuple(sorted(set(racks)).index(rack) for rack in racks)),)
    plan = make_plan(tiers, rank, len(racks))
    exchange = Tiers(NoCodec(NoKnobs()), group, tiers, plan, chunk_bytes=int(CHUNK_MB * 2**20))
    ways: dict[str, Way] = {"hierarchical": lambda tensor: exchange.start(tensor, (), None, StepMeter()).wait()}
    for name, order in orders(racks).items():
        ring = dist.ProcessGroupGloo(dist.PrefixStore(name, store), order.index(rank), len(racks), TIMEOUT)
        ways[name] = lambda tensor, ring=ring: ring.allreduce([tensor]).wait()
    return ways


def _racks(lab_file: file.LabFile) -> list[str]:
    """Rack of each device."""
    homes = {node.name: str(node.rack) for node in lab_file.nodes}
    return [homes[node] for _, node, _ in lab_file.devices]


def main() -> None:
    """Measure and write the table."""
    lab_file = file.load(LAB)
    ranks = len(lab_file.devices)
    take_times(LAB, prepare, ranks=ranks, sizes_mb=SIZES_MB, rounds=ROUNDS, folder=HERE)
    entries: dict[str, float] = json.loads((HERE / "results.json").read_text())
    uplink = lab_file.racks[0].uplink.up
    rows = []
    for size in SIZES_MB:
        times = {
            name: [entries[key(size, name, turn)] for turn in range(ROUNDS)]
            for name in ("hierarchical", *orders(_racks(lab_file)))
        }
        bound = size * 1e6 / uplink
        ours, best = times["hierarchical"], times["ring, topology order"]
        random_medians = [statistics.median(each) for name, each in times.items() if "random" in name]
        middle = statistics.median(ours)
        rows += [
            [f"{size} MB", "uplink at line rate", f"{bound:.3f}", f"{bound / middle:.2f} of its rate is reached"],
            [f"{size} MB", "hierarchical", spread(ours), ""],
            [f"{size} MB", "best ring", spread(best), f"{middle / statistics.median(best):.2f} of its time"],
            [
                f"{size} MB",
                f"rings in {RANDOM_ORDERS} random orders, medians",
                spread(random_medians),
                f"{middle / statistics.median(random_medians):.2f} of its time",
            ],
        ]
    text = f"Median [smallest, largest] of {ROUNDS} alternating rounds, s; {LAB}, chunks of {CHUNK_MB} MiB.\n\n"
    text += table(["all-reduce of", "how", "seconds", "hierarchical"], rows)
    (HERE / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
