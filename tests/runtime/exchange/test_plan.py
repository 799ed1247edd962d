"""The plan of a hierarchical all-reduce, carried out in one process on any tree of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.exchange.plan import Plan, make_plan
from paceline.runtime.mapping.levels import Level


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Level], int]:
    """Nested levels of up to three tiers over up to 12 ranks, with groups of any size in any order of ranks."""
    world_size = draw(st.integers(1, 12))
    levels: list[Level] = []
    units = [[rank] for rank in range(world_size)]
    for name in draw(st.sampled_from([(), ("node",), ("node", "rack"), ("node", "rack", "site")])):
        labels = draw(st.lists(st.integers(0, 3), min_size=len(units), max_size=len(units)))
        merged = {
            label: [r for unit, own in zip(units, labels, strict=True) if own == label for r in unit]
            for label in labels
        }
        groups = {rank: label for label, ranks in merged.items() for rank in ranks}
        levels.append(Level(name=name, groups=tuple(groups[rank] for rank in range(world_size))))
        units = list(merged.values())
    order = draw(st.permutations(range(world_size)))
    shuffled = [
        Level(name=level.name, groups=tuple(level.groups[order[r]] for r in range(world_size))) for level in levels
    ]
    return shuffled, world_size


def plans(levels: list[Level], world_size: int) -> list[Plan]:
    return [make_plan(levels, rank, world_size) for rank in range(world_size)]


@given(trees())
def test_every_rank_ends_with_the_sum_and_every_lane_is_completed_once(tree: tuple[list[Level], int]) -> None:
    everybody = plans(*tree)
    lanes = everybody[0].lanes
    held = [np.eye(len(everybody), dtype=int)[rank][:, None].repeat(lanes, axis=1) for rank in range(len(everybody))]
    for index in range(len(everybody[0].stages)):
        sent = {
            (rank, transfer.peer, transfer.first): held[rank][:, transfer.first : transfer.stop].copy()
            for rank, plan in enumerate(everybody)
            for transfer in plan.stages[index].sends
        }
        for rank, plan in enumerate(everybody):
            stage = plan.stages[index]
            for transfer in stage.receives:
                arrived = sent.pop((transfer.peer, rank, transfer.first))
                here = held[rank][:, transfer.first : transfer.stop]
                here[:] = here + arrived if stage.reduces else arrived
        assert not sent, "something was sent that nobody expected"
    for each in held:
        assert (each == 1).all(), "the sum must hold every rank's contribution exactly once"
    homes = sorted(home for plan in everybody for home in plan.home)
    assert [lane for first, stop in homes for lane in range(first, stop)] == list(range(lanes))


@given(trees())
def test_transfers_of_all_ranks_fit_together(tree: tuple[list[Level], int]) -> None:
    everybody = plans(*tree)
    assert len({(plan.lanes, plan.levels, len(plan.stages)) for plan in everybody}) == 1
    for index in range(len(everybody[0].stages)):
        sends = {
            (rank, t.peer, t.first, t.stop) for rank, plan in enumerate(everybody) for t in plan.stages[index].sends
        }
        gets = {
            (t.peer, rank, t.first, t.stop) for rank, plan in enumerate(everybody) for t in plan.stages[index].receives
        }
        assert sends == gets


def test_a_regular_tree_sends_what_the_formula_says() -> None:
    """2(m-1)/m of the bucket inside a group of m ranks, and 2(g-1)/g of 1/m of it between g groups."""
    levels = [Level(name="rack", groups=(0, 1, 0, 1, 0, 1, 0, 1))]
    for plan in plans(levels, 8):
        inside, between = (
            sum(t.stop - t.first for stage in plan.stages if stage.level == level for t in stage.sends) / plan.lanes
            for level in (0, 1)
        )
        assert (inside, between) == (2 * 3 / 4, 2 * (1 / 2) * (1 / 4))


def test_levels_that_group_nothing_further_are_skipped() -> None:
    singles = Level(name="node", groups=(0, 1, 2, 3))
    racks = Level(name="rack", groups=(0, 0, 1, 1))
    everything = Level(name="site", groups=(5, 5, 5, 5))
    assert make_plan([singles, racks, everything], 1, 4) == make_plan([racks], 1, 4)
    assert make_plan([singles], 0, 1).stages == ()
