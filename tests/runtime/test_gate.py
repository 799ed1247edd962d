"""The step gate: all ranks stop before the same step, whatever their threads do."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.worker.gate import StepGate

DEADLINE = 10.0


def test_steps_until_the_barrier_and_no_further() -> None:
    gate = StepGate()
    assert not gate.may_begin(1)
    gate.open(3, 5)
    assert [gate.may_begin(step) for step in (4, 5, 6)] == [True, True, False]
    assert gate.until == 5


def test_hold_names_the_first_step_not_begun() -> None:
    gate = StepGate()
    gate.open(0, 100)
    assert gate.may_begin(1)
    assert gate.hold() == 1
    gate.run_until(2)
    assert [gate.may_begin(step) for step in (2, 3)] == [True, False]


def test_a_rank_that_is_ahead_still_does_what_is_left_of_the_last_step() -> None:
    gate = StepGate()
    gate.open(0, 100)
    assert [gate.may_begin(step) for step in (1, 3, 2)] == [True] * 3
    assert gate.hold() == 3
    gate.run_until(3)
    assert [gate.may_begin(step) for step in (3, 4, 3)] == [True, False, True]


@pytest.mark.parametrize(("until", "begins"), [(0, False), (1, True)])
def test_a_held_rank_waits_and_is_released(monkeypatch: pytest.MonkeyPatch, until: int, begins: bool) -> None:
    gate = StepGate()
    gate.open(0, 100)
    waiting, wait = threading.Event(), gate._changed.wait

    def noticed() -> bool:
        waiting.set()
        return wait()

    monkeypatch.setattr(gate._changed, "wait", noticed)
    gate.hold()
    answers: list[bool] = []
    rank = threading.Thread(target=lambda: answers.append(gate.may_begin(1)))
    rank.start()
    assert waiting.wait(DEADLINE)
    gate.run_until(until)
    rank.join(DEADLINE)
    assert answers == [begins]


@pytest.mark.parametrize("held", [False, True])
def test_close_lets_nothing_begin(held: bool) -> None:
    gate = StepGate()
    gate.open(0, 100)
    if held:
        gate.hold()
    gate.close()
    assert not gate.may_begin(1)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=4))
def test_ranks_held_anywhere_stop_before_the_same_step(heads: list[int]) -> None:
    """Ranks in lock-step, as collectives keep them: a step ends only when all have begun it."""
    gates = [StepGate() for _ in heads]
    in_step = threading.Barrier(len(heads))
    done = [0] * len(heads)

    def train(rank: int) -> None:
        while gates[rank].may_begin(done[rank] + 1):
            in_step.wait(DEADLINE)
            done[rank] += 1

    for gate in gates:
        gate.open(0, 10**9)
    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(len(heads))]
    for thread in ranks:
        thread.start()
    held = [gate.hold() for gate in gates]
    for gate in gates:
        gate.run_until(max(held))
    for thread in ranks:
        thread.join(DEADLINE)
    assert done == [max(held)] * len(heads)
