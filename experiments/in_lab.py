"""What studies of bare exchanges share: one process per device of a lab, and exchanges that take turns."""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from experiments.resumable import Results
from paceline.runtime.lab import file, namespace
from paceline.runtime.lab.built import BuiltLab
from paceline.runtime.lab.network import DATA_INTERFACE

Way = Callable[[torch.Tensor], None]
"""Sums a tensor over the ranks in place, at a rank; at any other process, helps with it."""
Prepare = Callable[[file.LabFile, dist.Store], dict[str, Way]]
"""Makes the ways, by name, in every process; the default process group has one process per device. A module's own."""


def key(size_mb: float, name: str, turn: int) -> str:
    """Key of a time among the results."""
    return f"{size_mb} MB, {name}, {turn}"


def take_times(
    lab_name: str, prepare: Prepare, *, ranks: int, sizes_mb: Sequence[float], rounds: int, folder: Path
) -> None:
    """Build the lab and take all times that are missing, s, into the folder's results.

    The ranks are the first so many devices. All ways take turns in one run, so that whatever else the machine does hits
    all of them. A time is that of the slowest process, from a barrier to the last byte summed.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = DATA_INTERFACE
    lab_file = file.load(lab_name)
    lab = BuiltLab(lab_file)
    lab.build()
    try:
        places = [
            (namespace.path_of(lab.network.namespace(node)), lab.members_files(name))
            for name, node, _ in lab_file.devices
        ]
        with tempfile.TemporaryDirectory() as scratch:
            contest = _Contest(lab_file, places, f"{scratch}/store", prepare, ranks, sizes_mb, rounds, folder)
            mp.spawn(_process, (contest,), nprocs=len(places))
    finally:
        lab.destroy()


class _Contest(NamedTuple):
    """What a process has to know."""

    lab_file: file.LabFile
    places: list[tuple[str, list[str]]]
    """Namespace and cgroups of each device."""
    store: str
    prepare: Prepare
    ranks: int
    sizes_mb: Sequence[float]
    rounds: int
    folder: Path


def _process(index: int, contest: _Contest) -> None:
    path, members = contest.places[index]
    namespace.enter(path)
    for each in members:
        Path(each).write_text("0")
    torch.set_num_threads(1)
    shared, size = dist.FileStore(contest.store, 0), len(contest.places)
    dist.init_process_group("gloo", store=dist.PrefixStore("all", shared), rank=index, world_size=size)
    ways = contest.prepare(contest.lab_file, shared)
    results = Results(contest.folder)
    for size_mb, turn in itertools.product(contest.sizes_mb, range(contest.rounds)):
        for name, way in ways.items():
            entry = key(size_mb, name, turn)
            known = torch.tensor([entry in results.entries], dtype=torch.int)
            dist.broadcast(known, 0)
            if known:
                continue
            seconds = _time(way, int(size_mb * 10**6) // 4, contest.ranks)
            if index == 0:
                results.get(entry, lambda seconds=seconds: seconds)
                print(f"{entry}: {seconds:.3f} s", file=sys.stderr, flush=True)
    os._exit(0)


def _time(way: Way, elements: int, ranks: int) -> float:
    tensor = torch.full((elements,), float(dist.get_rank()))
    dist.barrier()
    began = time.perf_counter()
    way(tensor)
    seconds = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    assert dist.get_rank() >= ranks or (tensor == ranks * (ranks - 1) / 2).all(), "the sum is wrong"
    return seconds.item()
