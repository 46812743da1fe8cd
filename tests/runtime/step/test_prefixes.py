import random

import numpy as np
import pytest

from pensieve.runtime.step.prefixes import SHARED_KEYS, SharedPrefixes

CHUNK = 256  # four to a unit
SEATS, BLOCKS = 6, 18


class Seats:
    """A table and the prefixes kept beside it."""

    def __init__(self, chunk_tokens=CHUNK):
        self.table = np.full((SEATS, BLOCKS), -1, np.int32)
        self.prefixes = SharedPrefixes(self.table, chunk_tokens)

    def give(self, seat, first, slots):
        self.table[seat, first : first + len(slots)] = slots
        self.prefixes.changed(seat, first, len(slots))

    def clear(self, seat):
        self.table[seat] = -1
        self.prefixes.cleared(seat)

    def order(self, *seats):
        chunks = np.count_nonzero(self.table[list(seats)] >= 0, axis=1)
        return self.prefixes.order(np.array(seats), (chunks * CHUNK).astype(np.int32))


def test_rows_with_the_same_leading_slots_are_neighbours():
    seats = Seats()
    seats.give(0, 0, range(12))
    seats.give(1, 0, range(100, 112))
    seats.give(2, 0, (*range(8), 50, 51, 52, 53))
    assert seats.order(0, 1) is None
    order = seats.order(0, 1, 2)
    assert sorted(order[:, 0].tolist()) == [0, 1, 2] and order.dtype == np.int32
    assert sorted(order[:, 1].tolist()) == [0, 0, 2 * SHARED_KEYS]
    place = order[:, 1].argmax()
    assert {order[place - 1, 0], order[place, 0]} == {0, 2}


def test_incomplete_units_are_not_shared():
    seats = Seats()
    seats.give(0, 0, range(3))
    seats.give(1, 0, range(3))
    assert seats.order(0, 1) is None
    for seat in (0, 1):
        seats.give(seat, 3, [3])
    assert seats.order(0, 1)[:, 1].tolist() == [0, SHARED_KEYS]


def test_a_seat_that_is_given_away_shares_nothing():
    seats = Seats()
    for seat in (0, 1):
        seats.give(seat, 0, range(8))
    seats.clear(1)
    assert seats.order(0, 1) is None
    seats.give(1, 0, (*range(4), 9, 9, 9, 9))
    assert seats.order(0, 1)[:, 1].tolist() == [0, SHARED_KEYS]


def test_contexts_of_different_bands_are_apart():
    prefixes = SharedPrefixes(np.zeros((3, 40 * SHARED_KEYS // CHUNK), np.int32), CHUNK)
    for seat in range(3):
        prefixes.changed(seat, 0, 40 * SHARED_KEYS // CHUNK)
    lengths = np.array([40, 3, 39], np.int32) * SHARED_KEYS
    assert prefixes.order(np.arange(3), lengths).tolist() == [[1, 0], [0, 0], [2, 40 * SHARED_KEYS]]


@pytest.mark.parametrize("chunk_tokens", [48, 2048])
def test_other_chunk_sizes_share_nothing(chunk_tokens):
    seats = Seats(chunk_tokens)
    for seat in (0, 1):
        seats.give(seat, 0, [7] * BLOCKS)
    assert seats.order(0, 1) is None


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_share_what_their_tables_say(seed):
    """Random changes, chunks replaced in the middle too."""
    dice = random.Random(seed)
    seats = Seats()
    for _ in range(60):
        seat = dice.randrange(SEATS)
        held = int((seats.table[seat] >= 0).sum())
        if dice.random() < 0.15:
            seats.clear(seat)
        else:
            first = dice.randint(0, held)
            seats.give(
                seat, first, [dice.randrange(2) for _ in range(dice.randint(0, BLOCKS - first))]
            )
        present = [s for s in range(SEATS) if seats.table[s, 0] >= 0]
        order = seats.order(*present)
        units = {
            s: [tuple(seats.table[s, i : i + 4]) for i in range(0, BLOCKS - 3, 4)] for s in present
        }
        units = {s: [unit for unit in own if min(unit) >= 0] for s, own in units.items()}
        firsts = [own[0] for own in units.values() if own]
        assert (order is None) == (len(firsts) == len(set(firsts)))
        if order is None:
            continue
        assert sorted(order[:, 0].tolist()) == list(range(len(present)))
        rows = [units[present[i]] for i in order[:, 0]]
        assert order[0, 1] == 0
        for before, row, shared in zip(rows[:-1], rows[1:], order[1:, 1].tolist(), strict=True):
            equal = 0
            while equal < min(len(before), len(row)) and before[equal] == row[equal]:
                equal += 1
            assert shared == equal * SHARED_KEYS
        # rows with the same first unit are side by side
        for start in {row[0] for row in rows if row}:
            places = [i for i, row in enumerate(rows) if row and row[0] == start]
            assert places == list(range(places[0], places[-1] + 1))
