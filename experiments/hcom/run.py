"""An all-reduce between two racks: hierarchical, as a ring in the best order, and as a ring in random orders.

    python -m experiments.hcom.run        (as root)

The lab `two-racks` is built, and one process per device enters its node under its CPU quota. All exchanges take turns
in one run, so that whatever else the machine does hits all of them. A time is that of the slowest rank, from a barrier
to the last byte summed. The bound is what the uplink's line rate allows: with two racks, every byte of the result has
to leave each of them once.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from experiments.resumable import Results, spread, table
from paceline.runtime.compress import CODECS
from paceline.runtime.exchange import Tiers
from paceline.runtime.exchange.meter import StepMeter
from paceline.runtime.knobs import NoKnobs
from paceline.runtime.lab import file, namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.network import DATA_INTERFACE
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


def _rank(rank: int, lab_file: file.LabFile, places: list[tuple[str, list[str]]], store: str, out: str) -> None:
    path, members = places[rank]
    namespace.enter(path)
    for each in members:
        Path(each).write_text("0")
    torch.set_num_threads(1)
    racks = _racks(lab_file)
    world_size = len(racks)
    shared = dist.FileStore(store, 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("own", shared), rank=rank, world_size=world_size)
    tiers = (Level(name="rack", groups=tuple(sorted(set(racks)).index(rack) for rack in racks)),)
    group = dist.group.WORLD
    assert group is not None
    hierarchical = Tiers(
        CODECS.get("none")(NoKnobs()),
        group,
        tiers,
        levels=tiers,
        chunk_bytes=int(CHUNK_MB * 2**20),
        slow_only=False,
    )
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "hierarchical": lambda tensor: hierarchical.start(tensor, None, StepMeter()).wait()
    }
    for name, order in orders(racks).items():
        ring = dist.ProcessGroupGloo(dist.PrefixStore(name, shared), order.index(rank), world_size, TIMEOUT)
        ways[name] = lambda tensor, ring=ring: ring.allreduce([tensor]).wait()
    results = Results(Path(out))
    for size in SIZES_MB:
        for turn in range(ROUNDS):
            for name, way in ways.items():
                key = f"{size} MB, {name}, {turn}"
                known = torch.tensor([key in results.entries], dtype=torch.int)
                dist.broadcast(known, 0)
                if known:
                    continue
                seconds = _time(way, size * 10**6 // 4)
                if rank == 0:
                    results.get(key, lambda seconds=seconds: seconds)
                    print(f"{key}: {seconds:.3f} s", file=sys.stderr, flush=True)
    hierarchical.release()
    dist.destroy_process_group()


def _time(way: Callable[[torch.Tensor], Any], elements: int) -> float:
    tensor = torch.full((elements,), float(dist.get_rank()))
    dist.barrier()
    began = time.perf_counter()
    way(tensor)
    seconds = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    total = dist.get_world_size() * (dist.get_world_size() - 1) / 2
    assert (tensor == total).all(), "the sum is wrong"
    return seconds.item()


def _racks(lab_file: file.LabFile) -> list[str]:
    """Rack of each device."""
    homes = {node.name: str(node.rack) for node in lab_file.nodes}
    return [homes[node] for _, node, _ in lab_file.devices]


def measure() -> None:
    """Build the lab and take all times that are missing."""
    lab_file = file.load(LAB)
    lab = BuiltLab(lab_file)
    lab.build()
    try:
        places = [
            (namespace.path_of(lab.network.namespace(node)), lab.members_files(name))
            for name, node, _ in lab_file.devices
        ]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (lab_file, places, f"{folder}/store", str(HERE)), nprocs=len(places))
    finally:
        lab.destroy()


def main() -> None:
    """Measure and write the table."""
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = DATA_INTERFACE
    measure()
    entries: dict[str, float] = json.loads((HERE / "results.json").read_text())
    uplink = file.load(LAB).racks[0].uplink.up
    rows = []
    for size in SIZES_MB:
        times = {
            name: [entries[f"{size} MB, {name}, {turn}"] for turn in range(ROUNDS)]
            for name in ("hierarchical", *orders(_racks(file.load(LAB))))
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
