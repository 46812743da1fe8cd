"""Recurrent states on DISK: written, found after a restart, read, evicted and erased whole. The
device model checks every piece that is read."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pensieve.scheduler.kv import adoption
from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.piece_keys import (
    COMPUTATION_BYTES,
    KEY_BYTES,
    StatePiece,
    piece_key,
    split_key,
)
from pensieve.scheduler.kv.states import KeptStates
from pensieve.scheduler.planning.eviction import Evictor
from pensieve.scheduler.planning.plan_copies import StepCopies
from pensieve.scheduler.planning.promotions import promote
from pensieve.scheduler.planning.spills import spill, spill_ahead
from pensieve.scheduler.planning.state_lookup import (
    _Amounts,
    _amounts,
    _outside,
    _runs,
    _spans,
    _without,
)
from pensieve.scheduler.types import DISK, GPU, HOST, ChunkKey, Erasure, StoredRecord, Tier

from .test_state_lookup import OTHER, PROMPT, States

NOT_READ = [(0, 30)]


class Disk(States):
    """States of 2 pieces at multiples of 8; computing is slow, so reading pays."""

    def __init__(self, **settings):
        super().__init__(**({"disk_kv_chunks": 40} | settings))
        self._cost = replace(self._cost, chunk_seconds=10.0)
        self.scheduler = self.new_scheduler()

    def settle(self):
        """Until everything is written."""
        while self.scheduler.lower.unfinished or self.scheduler.lower.busy:
            self.now += 0.01
            self.tick()

    def pieces(self, *ends):
        """DISK slots of the pieces of states with these ends; of all, without any."""
        return [
            slot
            for slot, (key, end, _) in sorted(self.device.disk.items())
            if split_key(key)[1] is not None and (not ends or end in ends)
        ]

    def change(self, slot, **changes):
        key, end, content = self.device.disk[slot]
        one = StoredRecord(slot, key, end, 0.0)._replace(**changes)
        self.device.disk[slot] = (one.key, one.end, content)


@pytest.fixture
def written():
    """States at 16 and 24 are on DISK, as is all KV in full chunks."""
    served = Disk()
    served.turn(PROMPT, 4)
    served.settle()
    assert [served.device.disk[slot][1] for slot in served.pieces()] == [16, 16, 24, 24]
    yield served
    served.settle()
    served.drain()


def test_keys_of_pieces_are_those_of_no_chunk():
    key = ChunkKey(bytes(range(KEY_BYTES)))
    computations = [bytes([number] * COMPUTATION_BYTES) for number in range(3)]
    pieces = [StatePiece(number, one) for one in computations for number in range(300)]
    keys = [piece_key(key, piece) for piece in pieces]
    assert len({key, *keys}) == 901 and sorted(keys) == keys
    assert [split_key(one) for one in keys] == [(key, piece) for piece in pieces]
    assert split_key(key) == (key, None)


def test_a_restarted_process_finds_states_and_reads_the_one_that_it_needs(written):
    written.restart(prefetch=False)
    assert written.ends == [16, 24]
    promoted = written.counts["promoted"]
    assert written.spans(PROMPT) == [(24, 30)]
    assert written.counts["promoted"] == promoted + 24 // written.config.chunk_tokens + 2


def test_only_what_the_way_from_a_state_needs_is_read(written):
    """The other prompt parts behind 20 tokens, so its last span begins at 16."""
    written.restart(prefetch=False)
    promoted = written.counts["promoted"]
    assert written.spans([*PROMPT[:20], *OTHER[:6]]) == [(16, 26)]
    assert written.counts["promoted"] == promoted + 16 // written.config.chunk_tokens + 2


def test_no_kv_is_read_if_its_state_is_gone(written):
    """The zero state is the only one: all tokens are computed, so their KV need not be read."""
    for slot in written.pieces():
        del written.device.disk[slot]
    written.restart(prefetch=False)
    promoted = written.counts["promoted"]
    assert written.spans(PROMPT) == NOT_READ
    assert written.counts["promoted"] == promoted


def test_what_is_computed_faster_is_not_read(written):
    written._cost = replace(written._cost, chunk_seconds=1e-9, attention=((4, 1e-12),))
    written.restart()
    assert written.spans(PROMPT) == NOT_READ


def test_a_state_without_one_of_its_pieces_is_not_adopted(written):
    del written.device.disk[written.pieces(24)[1]]
    written.restart()
    assert written.ends == [16]
    written.settle()
    assert written.pieces(24) == []  # erased
    assert written.spans(PROMPT) == [(16, 30)]


@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_a_state_whose_records_tell_another_position_is_not_used(written, which):
    slots = written.pieces(24)
    for number in which:
        written.change(slots[number], end=28)
    written.restart()
    assert written.spans(PROMPT) == [(16, 30)]


def test_a_piece_that_is_there_twice_replaces_no_other(written):
    first, second = written.pieces(24)
    written.change(second, key=written.device.disk[first][0])
    written.restart()
    assert written.ends == [16]
    written.settle()
    assert written.pieces(24) == []


def compute_again(served, end):
    """The state is lost, computed again and written. Returns the records of both computations, in
    the order of their pieces."""
    before = [served.device.disk[slot] for slot in served.pieces(end)]
    served.lose_states(end)
    served.spans(PROMPT)
    served.settle()
    return before, [served.device.disk[slot] for slot in served.pieces(end)]


def test_a_state_is_not_adopted_from_pieces_of_two_computations(written):
    """A crash between the writes of the second one: their bits may differ."""
    first, _ = compute_again(written, 24)
    written.device.disk[written.pieces(24)[0]] = first[0]
    written.restart()
    assert written.ends == [16]
    written.settle()
    assert written.pieces(24) == []
    assert written.spans(PROMPT) == [(16, 30)]


@pytest.mark.parametrize("whole", ["first", "second", "both"])
def test_a_whole_state_is_adopted_beside_pieces_of_another_computation(written, whole):
    first, second = compute_again(written, 24)
    for slot in written.pieces(24):
        del written.device.disk[slot]
    left = {"first": [*second[:1], *first], "second": [*first[1:], *second]}
    records = left.get(whole, [*first, *second])
    written.device.disk |= dict(enumerate(records, max(written.device.disk) + 1))
    written.restart()
    assert written.ends == [16, 24]
    written.settle()
    keys = {written.device.disk[slot][0] for slot in written.pieces(24)}
    assert keys == {record[0] for record in (second if whole == "second" else first)}
    assert written.spans(PROMPT) == [(24, 30)]


def adopts_without_a_piece(monkeypatch, served):
    monkeypatch.setattr(adoption, "_whole", lambda records, count: True)
    del served.device.disk[served.pieces(24)[0]]


def takes_pieces_in_another_order(monkeypatch, served):
    adopt = KeptStates.adopt
    monkeypatch.setattr(
        KeptStates, "adopt", lambda self, state, pieces: adopt(self, state, pieces[::-1])
    )


def reads_a_stale_piece(monkeypatch, served):
    """A record with the right key and the content of another state's piece."""
    old = served.device.disk[served.pieces(16)[0]]
    slot = served.pieces(24)[0]
    served.device.disk[slot] = (*served.device.disk[slot][:2], old[2])


def mixes_positions_up(monkeypatch, served):
    """The state at 16 is taken for that at 24."""
    keys = {end: served.device.disk[served.pieces(end)[0]][0] for end in (16, 24)}
    for slot, other in zip(served.pieces(16), served.pieces(24), strict=True):
        for one, end in ((slot, 24), (other, 16)):
            piece = split_key(served.device.disk[one][0])[1]
            served.change(one, key=piece_key(split_key(keys[end])[0], piece), end=end)


@pytest.mark.parametrize(
    "mutate",
    [
        adopts_without_a_piece,
        takes_pieces_in_another_order,
        reads_a_stale_piece,
        mixes_positions_up,
    ],
)
def test_an_error_is_found(mutate, monkeypatch):
    served = Disk()
    served.turn(PROMPT, 4)
    served.settle()
    mutate(monkeypatch, served)
    with pytest.raises((AssertionError, ValueError)):
        served.restart()
        served.spans(PROMPT)


def test_a_state_with_a_record_that_cannot_be_read_is_given_up(written, monkeypatch):
    written.restart()
    bad = written.pieces(24)[1]
    monkeypatch.setattr(
        written,
        "reports",
        lambda: written.report([(slot, slot != bad) for slot in written.device.work]),
    )
    assert written.spans(PROMPT) == [(16, 30)]
    assert bad not in written.device.disk


def test_a_state_leaves_disk_whole(written):
    """One piece is evicted: the others' slots are released too."""
    written.restart()
    store = written.scheduler._store
    state = next(iter(written.scheduler._states.kept.by_key.values()))
    store.drop(state.pieces[0])
    written.check()
    assert not any(piece.resident for piece in state.pieces)
    written.settle()
    assert written.pieces(state.end) == []


def test_host_gives_states_up_that_are_on_disk(written):
    """A state in both tiers loses its copy on HOST first, and is read again."""
    store = written.scheduler._store
    for state in written.scheduler._states.kept.by_key.values():
        assert all(piece.slots[HOST] >= 0 and piece.slots[DISK] >= 0 for piece in state.pieces)
        for piece in state.pieces[:1]:
            store.release_host(piece)
    written.check()
    promoted = written.counts["promoted"]
    assert written.spans(PROMPT) == [(24, 30)]
    assert written.counts["promoted"] == promoted + 1


@pytest.mark.parametrize("restarts", [False, True])
def test_a_deleted_conversation_leaves_no_piece(restarts):
    served = Disk()
    served.takes_erased = True
    served.turn(PROMPT, 4, "a")
    log = [*served.logs["a"]]
    served.settle()
    assert served.pieces()
    if restarts:
        served.restart()
        served.erase(array("i", log))
    else:
        served.delete("a")
    served.settle()
    assert served.counts["erased wholly"] == 1
    assert served.device.disk == {}
    served.drain()


def test_a_piece_whose_state_is_deleted_during_its_read_is_erased_after_it(written, monkeypatch):
    written.takes_erased = True
    written.restart()
    with monkeypatch.context() as patched:
        patched.setattr(written, "reports", dict)
        request = written.submit(PROMPT, 4)
        written.tick()
        assert any(split_key(work.key)[1] is not None for work in written.device.work.values())
        written.erase(array("i", PROMPT))
        for _ in range(5):
            written.tick()
        assert written.pieces(24)
    written.abort(request)
    written.settle()
    assert written.counts["erased wholly"] == 1 and written.pieces() == []


def test_a_deletion_waits_for_the_writes_of_pieces(monkeypatch):
    served = Disk()
    served.turn(PROMPT, 4, "a")

    def all_but_pieces():
        work = served.device.work.items()
        return served.report([(slot, True) for slot, one in work if split_key(one.key)[1] is None])

    with monkeypatch.context() as patched:
        patched.setattr(served, "reports", all_but_pieces)
        for _ in range(20):
            served.tick()
        assert served.device.work and not any(
            split_key(work.key)[1] is None for work in served.device.work.values()
        )
        served.scheduler.conversations.delete("a")
        served.logs.clear()
        for _ in range(5):
            served.tick()
        assert served.scheduler.lower.take_erased() == []
    while served.scheduler.lower.busy:
        served.tick()
    assert served.scheduler.lower.take_erased() == [Erasure.WHOLLY]
    assert served.device.disk == {}
    served.drain()


def test_records_of_a_deleted_state_that_was_evicted_before_are_erased():
    """Its slots are released, and not overwritten or erased yet, when the deletion comes."""
    served = Disk()
    served.turn(PROMPT, 4, "a")
    served.settle()
    kept = served.scheduler._states.kept
    for state in list(kept.by_key.values()):
        served.scheduler._store.drop(state.pieces[0])
    served.scheduler.conversations.delete("a")
    served.logs.clear()
    while served.scheduler.lower.busy:
        served.tick()
    assert served.scheduler.lower.take_erased() == [Erasure.WHOLLY]
    assert served.device.disk == {}
    served.drain()


def test_prefetching_reads_the_state_of_a_waiting_request(written):
    written.restart(max_num_seqs=1)
    written.submit([*range(100, 110)], 8)
    written.tick()
    written.submit(PROMPT, 4)
    for _ in range(4):
        written.tick()
    state = max(written.scheduler._states.kept.by_key.values(), key=lambda state: state.end)
    assert all(piece.slots[HOST] >= 0 for piece in state.pieces)
    written.run()


def test_pieces_are_on_no_gpu_slot_and_in_no_count_of_the_gpu(written):
    kept = written.scheduler._states.kept
    assert all(piece.slots[GPU] < 0 for state in kept.by_key.values() for piece in state.pieces)
    assert written.scheduler._store.lower[0].tier is Tier.DISK


def random_ranges(random, size=1):
    points = sorted(random.sample(range(60), random.randint(2, 16)))
    return [(start * size, end * size) for start, end in pairwise(points) if random.random() < 0.5]


def test_ranges_are_those_of_their_tokens():
    """Against the definition, on random ascending ranges."""
    random = Random(6)
    size = 4
    for _ in range(500):
        holes = random_ranges(random, size)
        tokens = [token for hole in holes for token in range(*hole)]
        whole = [end for end in range(size, 240, size) if end - size in tokens]
        ends = sorted(random.sample(whole, random.randint(0, len(whole))))
        parts = [(end - size, end) for end in ends]
        read = {token for part in parts for token in range(*part)}
        left = [token for hole in _without(holes, parts) for token in range(*hole)]
        assert left == [token for token in tokens if token not in read]

        runs = random_ranges(random)
        computed = {token for run in runs for token in range(*run)}
        inside = [any(start <= end - size and end <= stop for start, stop in runs) for end in ends]
        assert all(
            {*range(end - size, end)} <= computed
            for end, is_in in zip(ends, inside, strict=True)
            if is_in
        )
        chosen = [end for first, last in _outside(ends, runs, size) for end in ends[first:last]]
        assert chosen == [end for end, is_in in zip(ends, inside, strict=True) if not is_in]


def test_amounts_of_ways_are_those_of_their_runs():
    """Against the runs of each way, on random holes and states."""
    random = Random(3)
    for _ in range(500):
        holes = random_ranges(random, 4)
        begins = sorted({0, *random.sample(range(0, 240, 8), random.randint(0, 12))})

        def of_run(run):
            start, end = run
            return _Amounts(end - start, start > 0, start % 7, end % 5)

        def added(runs):
            return tuple(map(sum, zip(*map(of_run, runs), strict=True)))

        assert list(_amounts(holes, begins, 260, of_run)) == [
            added(_runs(holes, begins, begin, 260)) for begin in begins
        ]


def test_spans_of_runs_are_those_of_all_holes():
    random = Random(4)
    for _ in range(500):
        holes = random_ranges(random, 4)
        start, end = sorted(random.sample(range(250), 2))
        spans = list(_spans(holes, start, end))
        assert [spans[0].start, *(span.end for span in spans)] == [
            *(span.start for span in spans),
            end,
        ]
        written = [token for span in spans for token in range(span.write_from, span.end)]
        assert spans[0].start == start
        assert written == [
            token for hole in holes for token in range(*hole) if start <= token < end
        ]


def parted():
    """A server, its evictor, and a state with one piece on DISK alone, the other on HOST alone."""
    served = Disk()
    served.turn(PROMPT, 4)
    served.settle()
    store = served.scheduler._store
    state = max(served.scheduler._states.kept.by_key.values(), key=lambda state: state.end)
    read, copied = state.pieces
    store.release_host(read)
    store.release_record(copied, store.lower[0])
    served.tick()
    served.tick()
    evictor = Evictor(store, StepCopies(999, store.gpu, store.host), served.now + 6)
    return served, evictor, read, copied


def make_others_dearer(served, victim, kept):
    store = served.scheduler._store
    for chunk in store.resident_chunks():
        if chunk is not victim:
            store.touch(chunk, served.now + 5, None)
    store.touch(kept, served.now, (0, 1))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_piece_that_goes_with_its_sibling_is_not_written(ahead):
    served, evictor, read, copied = parted()
    store = served.scheduler._store
    make_others_dearer(served, read, copied)
    lower = store.lower[0]
    while lower.room:
        lower.take()
    if ahead:
        for chunk in store.resident_chunks():
            if chunk not in (read, copied) and not chunk.users and chunk.slots[HOST] != NO_SLOT:
                store.release_host(chunk)
        spill_ahead(evictor, lower, store.host.free + 1, 1)
    else:
        spill(evictor, copied, lower)
    assert all(spill.host != NO_SLOT for spill in lower._spills)
    assert not ahead or not copied.resident or copied.moving is None


def test_a_piece_that_goes_with_its_sibling_is_not_read():
    served, evictor, read, copied = parted()
    store = served.scheduler._store
    make_others_dearer(served, copied, read)
    while store.host.free:
        store.host.take()
    for chunk in store.resident_chunks():
        if chunk not in (read, copied) and not chunk.users and chunk.slots[HOST] != NO_SLOT:
            store.release_host(chunk)
            store.host.take()
    assert promote(evictor, read, drops=True) is False
    assert not read.resident and not copied.resident


def test_a_deletion_counts_the_records_of_a_state_that_is_forgotten():
    """Another one has replaced it, and it is dropped when the next plan begins."""
    served = Disk()
    served.turn(PROMPT, 4)
    served.settle()
    scheduler = served.scheduler
    kept = scheduler._states.kept
    state = max(kept.by_key.values(), key=lambda state: state.end)
    slots = [piece.slots[DISK] for piece in state.pieces]
    kept.forget(state)
    pieces = kept.delete(state.key)
    assert [piece.slots[DISK] for piece in pieces] == slots
