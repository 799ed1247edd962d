"""Find the racks of a cluster in the rates between its nodes."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

SEPARATION = 1.4
"""How many times faster traffic must be inside every rack than between any two, or there are none. Measurements of
equal links differ by less."""

Floats = npt.NDArray[np.float64]


def find_racks(rates: Floats) -> list[list[int]]:
    """Groups of nodes, from their rates [n, n] in B/s with anything on the diagonal; one group if there are no racks.

    Rates are those of pairs that exchange while others do, so equal paths between racks come out unequal. Each pair is
    compared with what its slower node reaches at best, so a slow link makes no rack of its node. The nodes are then
    clustered by average linkage (Sokal and Michener, 1958), and of all cuts of the tree the finest is taken in which
    racks are clearly faster inside than between each other. A node so slow that no uplink ever held it back could be
    in any of them.
    """
    count = len(rates)
    if count < 3:
        return [list(range(count))]
    both = np.maximum(rates, rates.T).astype(float)
    np.fill_diagonal(both, 0.0)
    best = both.max(axis=1)
    relative = np.clip(both / np.minimum.outer(best, best), 1e-6, 1.0)
    distance = -np.log(relative)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), method="average")
    for groups in range(count - 1, 1, -1):
        labels = fcluster(tree, groups, criterion="maxclust")
        racks = [[int(node) for node in np.flatnonzero(labels == label)] for label in dict.fromkeys(labels)]
        if len(racks) == groups and _is_separated(relative, racks):
            return _settled(relative, racks)
    return [list(range(count))]


def _settled(relative: Floats, racks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The racks with each node in the one that it reaches fastest on average.

    A slow node reaches some of every rack equally fast, so the tree may have joined it to any of these.
    """
    settled = [list(rack) for rack in racks]
    for own, rack in enumerate(racks):
        for node in rack:
            if len(settled[own]) == 1:
                break
            means = [relative[node, [other for other in each if other != node]].mean() for each in settled]
            best = int(np.argmax(means))
            if means[best] > means[own]:
                settled[own].remove(node)
                settled[best].append(node)
    return [sorted(rack) for rack in settled]


def _is_separated(relative: Floats, racks: Sequence[Sequence[int]]) -> bool:
    # Medians, as any single pair may have had a bad moment.
    inside = min(
        float(np.median(relative[np.ix_(rack, rack)][~np.eye(len(rack), dtype=bool)]))
        for rack in racks
        if len(rack) > 1
    )
    return all(
        inside > SEPARATION * float(np.median(relative[np.ix_(rack, other)])) for rack, other in combinations(racks, 2)
    )
