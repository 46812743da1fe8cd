"""Recurrent states in the shared tier: one record, written and read whole. The device model checks
every piece that is read."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.shared_tier import GATHERING_PLANS, SharedTier
from pensieve.scheduler.kv.states import KeptStates
from pensieve.scheduler.planning import admission
from pensieve.scheduler.planning.promotions import promote
from pensieve.scheduler.planning.state_lookup import StateLookup
from pensieve.scheduler.types import HOST, Erasure, InvariantError

from .shared_model import SharedDriver, WithSharedTier
from .test_state_lookup import OTHER, PROMPT, States
from .test_states import StateDriver
from .test_states import drawn as drawn_states


class SharedStates(WithSharedTier, States):
    """States of 2 pieces at multiples of 8; computing is slow, so reading pays."""

    def __init__(self, **settings):
        super().__init__(**({"host_kv_chunks": 60} | settings))
        self._cost = replace(self._cost, chunk_seconds=10.0)
        self.scheduler = self.new_scheduler()

    def settle(self):
        self.run_until(lambda: not (self.scheduler.lower.unfinished or self.scheduler.lower.busy))

    @property
    def states(self):
        """Keys of the store's states."""
        return [key for key in self.device.shared if key.endswith(b"state")]

    @property
    def here(self):
        """Ends of the states that are found by a key."""
        return sorted(state.end for state in self.scheduler._states.kept.by_key.values())

    def reading(self):
        """Slots of a state's reads that the store has begun."""
        return [slot for slot, work in self.device.moves.items() if len(work.key) > 32]


def written(**settings):
    """The store has all KV of the prompt's full chunks and states at 16 and 24; no other tier has
    any."""
    served = SharedStates(**settings)
    served.turn(PROMPT, 4)
    served.settle()
    served.lose(lambda idle: idle)
    assert len(served.states) == 2 and served.here == []
    return served


def test_a_state_is_written_and_read_whole():
    served = written()
    assert served.spans(PROMPT) == [(24, 30)]
    assert served.counts["states spilled"] == 2 and served.counts["states promoted"] == 1
    assert served.counts["shared promoted"] == 24 // served.config.chunk_tokens + 2
    served.settle()
    assert served.counts["states spilled"] == 2, "what the store has is not written again"
    served.drain()


def test_a_prompt_that_parts_earlier_begins_at_an_earlier_state():
    served = written()
    assert served.spans([*PROMPT[:20], *OTHER[:6]]) == [(16, 26)]
    served.drain()


def test_a_prompt_that_ends_at_the_last_state_begins_at_the_one_before():
    served = written()
    assert served.spans(PROMPT[:24]) == [(16, 24)]
    served.drain()


@pytest.mark.parametrize("gone", ["before it is found", "before it is read"])
def test_a_state_that_is_gone_is_computed(gone):
    served = written()
    served.ends = False
    served.computed = []
    request = served.submit(PROMPT, 4)
    if gone == "before it is read":
        served.run_until(served.reading)
    for key in served.states:
        del served.device.shared[key]
    served.ends = True
    served.run(request)
    assert served.joined() == [(0, 30)]
    served.drain()


def test_the_state_before_one_that_is_gone_is_read():
    served = written()
    del served.device.shared[served.states[1]]
    assert served.spans(PROMPT) == [(16, 30)]
    served.settle()
    assert len(served.states) == 2, "the other one is written again"
    served.drain()


def kv_keys(served):
    """Keys of the prompt's chunks, which the store has."""
    keys = []
    served.scheduler._chunk_keys.extend(keys, 0, b"", array("i", PROMPT), 28)
    return keys


@pytest.mark.parametrize(
    "gone, spans",
    [
        (slice(4, 5), [(16, 20), (24, 30)]),
        (slice(5, 6), [(16, 30)]),
        (slice(4, None), [(16, 30)]),
    ],
)
def test_an_earlier_state_is_read_for_a_hole_of_kv(gone, spans):
    served = written()
    for key in kv_keys(served)[gone]:
        del served.device.shared[key]
    assert served.spans(PROMPT) == spans
    served.drain()


def test_a_hole_of_kv_at_the_start_needs_no_earlier_state():
    served = written()
    del served.device.shared[kv_keys(served)[0]]
    assert served.spans(PROMPT) == [(0, 4), (24, 30)]
    assert served.counts["states promoted"] == 1
    served.drain()


def test_kv_is_not_read_where_no_state_is():
    served = written()
    for key in served.states:
        del served.device.shared[key]
    assert served.spans(PROMPT) == [(0, 30)]
    assert served.counts["shared promoted"] == 0
    served.drain()


def test_a_slow_store_is_not_read():
    served = written()
    served.read_s = 1e3
    assert served.spans(PROMPT) == [(0, 30)]
    served.run_until(lambda: served.here == [16, 24])
    assert served.counts["shared promoted"] == 0
    served.drain()


def test_a_state_that_is_gone_is_read_though_its_kv_is_here():
    served = SharedStates()
    served.turn(PROMPT, 4)
    served.settle()
    served.lose_states(24)
    assert served.here == [16]
    served.now += 5.0
    assert served.spans(PROMPT) == [(24, 30)]
    served.lose(lambda idle: [chunk for chunk in idle if chunk.state is not None])
    assert served.spans(PROMPT) == [(24, 30)]
    assert served.counts["shared promoted"] == 4, "no KV is read"
    served.drain()


def test_the_store_is_not_asked_for_a_state_that_is_here():
    served = SharedStates()
    served.turn(PROMPT, 4, "a")
    served.settle()
    served.answers = False
    assert served.spans([*served.logs["a"], 1], 4, "a") == [(33, 35)]
    assert not served.device.questions
    served.answers = True
    served.drain()


def test_a_fetch_that_is_not_made_drops_nothing():
    served = written()
    served.read_s = 1e3
    dropped = served.scheduler._store.dropped
    assert served.spans(PROMPT) == [(0, 30)]
    assert served.scheduler._store.dropped == dropped
    served.drain()


def test_a_computed_state_is_kept_while_a_request_awaits_the_stores_copy():
    served = written(max_num_seqs=1)
    served.read_s = 1e3
    busy = served.submit(OTHER, 30)
    served.launch()
    first = served.submit([*PROMPT, 1], 2, marks=(30,))
    served.run_until(lambda: 24 in served.here)
    second, third = (served.submit([*PROMPT, last], 2, marks=(30,)) for last in (2, 3))
    served.run(busy)
    served.computed = []
    served.run(first, second, third)
    assert served.joined() == [(0, 31), (24, 31), (24, 31)]
    served.drain()


def test_a_late_read_is_computed_and_keeps_its_slots():
    served = written()
    served.ends = False
    request = served.submit(PROMPT, 4)
    served.run_until(served.reading)
    served.late = [*served.device.moves]
    served.computed = []
    served.run(request)
    assert served.joined() == [(0, 30)]
    served.ends = True
    served.drain()


def test_a_request_that_leaves_leaves_no_state_behind():
    served = written()
    served.ends = False
    request = served.submit(PROMPT, 4)
    served.run_until(served.reading)
    served.abort(request)
    served.ends = True
    served.settle()
    store = served.scheduler._store
    left = [chunk for chunk in store.resident_chunks() if chunk.state is not None]
    assert all(chunk.slots[HOST] != NO_SLOT for chunk in left)
    served.drain()


def refuse_last_pieces(monkeypatch):
    """HOST has no room for them."""

    def refuses(evictor, chunk, drops):
        last = chunk.state is not None and chunk is chunk.state.pieces[-1]
        return False if last else promote(evictor, chunk, drops)

    monkeypatch.setattr(admission, "promote", refuses)


def test_nothing_is_read_or_awaited_if_host_has_no_room_for_the_state(monkeypatch):
    """All but one of the state's pieces have begun."""
    served = written()
    refuse_last_pieces(monkeypatch)
    before = served.device.step
    served.computed = []
    request = served.submit(PROMPT, 4)
    served.run_until(lambda: served.computed)
    assert served.device.step - before < GATHERING_PLANS
    served.run(request)
    assert served.joined() == [(0, 30)]
    served.settle()
    assert served.counts["shared promoted"] == 0
    store = served.scheduler._store
    assert not served.reading() and not store.shared._moves and not store.shared._gathering
    assert store.lower.reading == 0
    served.drain()


def test_a_deletion_removes_states():
    served = SharedStates()
    served.turn(PROMPT, 4, "a")
    served.settle()
    assert served.states
    served.lose(lambda idle: [chunk for chunk in idle if chunk.state is not None])
    served.delete("a")
    served.settle()
    assert served.scheduler.lower.take_erased() == [Erasure.WHOLLY]
    assert not served.device.shared
    served.drain()


def test_a_server_that_stops_writes_states():
    served = SharedStates()
    tier = served.scheduler._store.shared
    tier.paused_until = inf
    served.turn(PROMPT, 4, "a")
    served.settle()
    assert not served.device.shared
    tier.paused_until = 0.0
    for chunk in served.scheduler.conversations.get("a").chunks:
        served.place(chunk, "host")
    served.scheduler.stop(served.now)
    served.settle()
    assert len(served.states) == 2
    served.drain()


class SharedStateDriver(SharedDriver, StateDriver):
    """Random operations of a model with states."""


def drawn(seed):
    settings = drawn_states(seed)
    settings["host_kv_chunks"] = max(20, settings["host_kv_chunks"])
    return settings | {"truncates": 0.1, "save": ("async", "sync")[seed % 2]}


SEEDS = range(16)
totals = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations(seed):
    SharedStateDriver(seed=seed, **drawn(seed)).play(800, totals)


@pytest.mark.parametrize("event", ["spilled", "promoted", "failed"])
def test_the_random_operations_reach_states_that_are(event):
    if totals["runs"] == len(SEEDS):
        assert totals[f"states {event}"] > 5, totals


# -- mutants: each error is found


def one_piece_missing(monkeypatch):
    """Reads are handed over before all have begun."""
    gather = SharedTier._gather

    def all_at_once(self):
        self._promotions += [read for reads in self._gathering.values() for read in reads]
        self._gathering.clear()
        gather(self)

    monkeypatch.setattr(SharedTier, "_gather", all_at_once)
    refuse_last_pieces(monkeypatch)


def pieces_of_another_state(monkeypatch):
    """A learned state is taken for the one before."""
    learn = KeptStates.learn
    monkeypatch.setattr(
        KeptStates, "learn", lambda self, key, end, now: learn(self, key, end - 8, now)
    )
    states = StateLookup._states

    def moved(self, *args):
        right = states(self, *args)
        every = self._config.multiple
        moved = {one.end: one for one in self._kept.by_key.values() if one.end % every == 0}
        usable = args[-1]
        return right | {end: one for end, one in moved.items() if usable(one)}

    monkeypatch.setattr(StateLookup, "_states", moved)


@pytest.mark.parametrize("mutate", [one_piece_missing, pieces_of_another_state])
def test_an_error_is_found(mutate, monkeypatch):
    served = written()
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, InvariantError)):
        served.spans(PROMPT)
        served.drain()
