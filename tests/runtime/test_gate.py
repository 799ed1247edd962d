"""The step gate: all ranks stop before the same step, whatever their threads do."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.worker.gate import StepGate

DEADLINE = 10.0


def test_steps_until_the_barrier_and_no_further() -> None:
    gate = StepGate()
    assert not gate.may_begin()
    gate.open(3, 5)
    assert [gate.may_begin() for _ in range(3)] == [True, True, False]


def test_hold_names_the_first_step_not_begun() -> None:
    gate = StepGate()
    gate.open(0, 100)
    assert gate.may_begin()
    assert gate.hold() == 1
    gate.run_until(2)
    assert [gate.may_begin() for _ in range(2)] == [True, False]


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
    rank = threading.Thread(target=lambda: answers.append(gate.may_begin()))
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
    assert not gate.may_begin()


@given(st.lists(st.integers(0, 20), min_size=2, max_size=4))
def test_ranks_held_anywhere_stop_before_the_same_step(heads: list[int]) -> None:
    """Ranks in lock-step, as collectives keep them: a step ends only when all have begun it."""
    gates = [StepGate() for _ in heads]
    in_step = threading.Barrier(len(heads))
    done = [0] * len(heads)

    def train(rank: int) -> None:
        while gates[rank].may_begin():
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
