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
    racks are clearly faster inside than between each other.
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
            return racks
    return [list(range(count))]


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
