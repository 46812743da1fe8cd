from __future__ import annotations

import pytest

from pensieve.scheduler.kv.slots import SlotPool
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import InvariantError


def test_slots_go_round_first_in_first_out():
    """The slot that has been free for longest has the fewest users left to wait for."""
    pool = SlotPool(3)
    assert [pool.take(), pool.take()] == [0, 1]
    pool.give(1)
    pool.give(0)
    assert pool.free == 3
    assert [pool.take() for _ in range(3)] == [2, 1, 0]


def test_new_slots_are_free_behind_the_others_and_unused():
    pool = SlotPool(2)
    pool.last[Lane.OUT][1] = 7
    taken = pool.take()
    pool.grow(4)
    pool.give(taken)
    pool.check([])
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 0]
    assert [list(last) for last in pool.last] == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 7, 0, 0]]


@pytest.mark.parametrize("owned", [[], [1], [0, 0], [0, 2]])
def test_a_slot_is_free_or_owned_once(owned):
    pool = SlotPool(2)
    slot = pool.take()
    pool.check([slot])
    with pytest.raises(InvariantError):
        pool.check(owned)
