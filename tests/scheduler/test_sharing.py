"""The scheduler with a tier that other servers use too."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from pensieve.scheduler.kv import shared_tier
from pensieve.scheduler.kv.dropped_keys import DroppedKeys
from pensieve.scheduler.kv.shared_tier import AGAIN_S
from pensieve.scheduler.plan import Promotion, Spill
from pensieve.scheduler.planning import sharing
from pensieve.scheduler.types import Erasure

from .shared_model import SharedDriver, SharedHarness

PROMPT = range(18)  # four full chunks and a half one
LONG = range(50)  # twelve full chunks and a half one


def written(prompt=PROMPT, **settings):
    """A harness whose store has the full chunks of a turn, and no chunk of it anywhere else."""
    harness = SharedHarness(**settings)
    harness.turn(prompt, 1)
    chunks = len(prompt) // 4
    harness.run_until(
        lambda: len(harness.device.shared) == chunks and not harness.scheduler.lower.busy
    )
    harness.lose(lambda idle: idle)
    return harness


def moves(harness, kind):
    return [slot for slot, work in harness.device.moves.items() if isinstance(work, kind)]


def test_an_ended_turn_is_written_and_read_again():
    harness = written()
    assert harness.turn(PROMPT, 1)["shared"] == 16
    assert harness.counts["shared promoted"] == 4
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert harness.counts["shared spilled"] == 4, "what the store has is not written again"
    harness.drain()


def test_a_copy_for_the_store_alone_does_not_stay_on_the_host():
    harness = SharedHarness()
    harness.turn(PROMPT, 1)
    harness.run_until(lambda: len(harness.device.shared) == 4 and not harness.scheduler.lower.busy)
    assert harness.scheduler._store.host.free == 30
    assert harness.turn(PROMPT, 1)["gpu"] == 16
    harness.drain()


def test_a_full_host_gives_its_oldest_slots_to_chunks_on_their_way():
    harness = SharedHarness()

    def turn_is_written(number):
        harness.turn([1000 * number + token for token in PROMPT], 1)
        harness.run_until(lambda: len(harness.device.shared) == 4 * number)

    for number in range(1, 31):
        turn_is_written(number)
    harness.drain()


@pytest.mark.parametrize("settings", [{"shared_min_tokens": 20}, {"save": "off"}])
def test_short_contexts_are_neither_written_nor_looked_for(settings):
    harness = SharedHarness(**settings)
    harness.turn(PROMPT, 1, "a")
    for chunk in harness.scheduler.conversations.get("a").chunks:
        harness.place(chunk, "host")
    harness.tick()
    harness.scheduler.stop(harness.now)
    assert not harness.scheduler.lower.unfinished
    assert not harness.device.shared and not harness.device.questions
    harness.drain()


def test_a_slow_store_is_not_read():
    harness = written()
    harness.read_s = 10.0
    harness.turn(PROMPT, 1)
    assert harness.counts["shared tokens"] == 0
    harness.drain()


def test_a_request_waits_20_ms_for_an_answer():
    harness = written()
    harness.answers = False
    request = harness.submit(PROMPT, 1)
    began = harness.now
    while harness.state(request) == "waiting":
        harness.tick(0.004)
    assert 0.02 <= harness.now - began <= 0.033
    harness.run()
    assert harness.counts["shared tokens"] == 0
    harness.answers = True
    harness.drain()


def test_a_host_full_of_copies_takes_all_that_is_read():
    """A conversation of many chunks came, then another: it is fetched whole, not in part."""
    harness = written(host_kv_chunks=8)
    harness.turn(range(100, 134), 1, "other")
    for chunk in harness.scheduler.conversations.get("other").chunks:
        harness.place(chunk, "both")
    assert not harness.scheduler._store.host.free
    assert harness.turn(PROMPT, 1)["shared"] == 16
    assert harness.turn(range(100, 134), 1)["gpu"] == 32, "they have lost copies only"
    harness.drain()


def test_a_request_waits_longer_for_an_answer_that_may_spare_more():
    """A tenth of the predicted time to compute what is missing."""
    harness = written(prompt=LONG)
    harness.answers = False
    request = harness.submit(LONG, 1)
    (turn,) = harness.scheduler._queues.waiting
    turn.work = 0.5
    began = harness.now
    while harness.state(request) == "waiting":
        harness.tick(0.004)
    assert 0.05 <= harness.now - began <= 0.063
    harness.answers = True
    harness.drain()


def test_what_is_read_is_swapped_in_while_the_rest_is_read():
    harness = written()
    sharing = harness.scheduler._sharing
    sharing._least_swap_ins = 2
    ended = []
    harness.ended_moves = lambda: [(slot, True) for slot in ended if slot in harness.device.moves]
    request = harness.submit(PROMPT, 1)
    harness.run_until(lambda: len(moves(harness, Promotion)) == 4)
    slots = moves(harness, Promotion)
    for read, swapped_in in ((1, 0), (3, 3)):
        ended[:] = slots[:read]
        for _ in range(5):
            harness.tick()
        assert harness.scheduler.stats().swapped_in == swapped_in
        assert harness.state(request) == "waiting"
    ended[:] = slots
    harness.run(request)
    assert harness.counts["shared tokens"] == 16
    assert harness.scheduler.stats().swapped_in == 4, "each of them once"
    harness.drain()


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_is_swapped_in_for_a_request_that_has_left_or_without_room(leaves):
    harness = written()
    harness.scheduler._sharing._most_swap_ins = 1
    harness.ends = False
    request = harness.submit(PROMPT, 1)
    harness.run_until(lambda: len(moves(harness, Promotion)) == 4)
    if leaves:
        harness.abort(request)
    else:
        harness.scheduler._sharing._reserve = harness.scheduler._store.gpu.count
    slots = moves(harness, Promotion)
    harness.ended_moves = lambda: [
        (slot, True) for slot in slots[:3] if slot in harness.device.moves
    ]
    for _ in range(5):
        harness.tick()
    assert harness.scheduler.stats().swapped_in == 0
    harness.ended_moves = lambda: [(slot, True) for slot in harness.device.moves]
    if not leaves:
        harness.run(request)
        assert harness.counts["shared tokens"] == 16
    harness.drain()


def test_a_late_read_is_computed_and_keeps_its_slots():
    harness = written()
    harness.ends = False
    request = harness.submit(PROMPT, 1)
    harness.run_until(lambda: len(moves(harness, Promotion)) == 4)
    free = harness.scheduler._store.host.free
    harness.tick()
    assert harness.state(request) == "waiting"
    harness.late = moves(harness, Promotion)
    harness.run(request)
    assert harness.counts["shared tokens"] == 0
    assert harness.scheduler._store.host.free == free == 26
    assert harness.scheduler._store.lower.reading == 0, "nobody waits for them"
    harness.ends = True
    harness.turn(range(50, 60), 1)
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert harness.scheduler._store.host.free == 30
    harness.drain()


@pytest.mark.parametrize("read", [False, True])
def test_records_that_never_came_here_are_not_counted_as_dropped(read):
    harness = written()
    store = harness.scheduler._store
    store._forgotten = DroppedKeys(most=99)  # another server has written them
    before = store.dropped, store.regret_tokens
    harness.ends = False
    request = harness.submit(PROMPT, 1)
    harness.run_until(lambda: len(moves(harness, Promotion)) == 4)
    if read:
        harness.device.shared.clear()
    else:
        harness.late = moves(harness, Promotion)
    harness.ends = read
    harness.run(request)
    assert (store.dropped, store.regret_tokens) == before
    harness.ends = True
    harness.drain()


def test_a_missing_record_is_computed():
    harness = written()
    harness.ends = False
    request = harness.submit(PROMPT, 1)
    harness.run_until(lambda: len(moves(harness, Promotion)) == 4)
    harness.device.shared.popitem()
    harness.ends = True
    harness.run(request)
    assert harness.counts["shared tokens"] == 12
    harness.drain()


def test_a_deletion_waits_for_its_own_write_and_removes_twice():
    harness = SharedHarness()
    harness.turn(PROMPT, 1, "a")
    harness.ends = False
    harness.run_until(lambda: len(moves(harness, Spill)) == 4)
    harness.delete("a")
    for _ in range(3):
        harness.tick()
    assert harness.scheduler.lower.take_erased() == []
    harness.ends = True
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]
    assert harness.counts["shared spilled"] == 4 and not harness.device.shared
    key = next(iter(harness.device.written))
    harness.device.shared[key] = {}  # by a server that did not know yet
    assert harness.scheduler.wake_at <= harness.now + AGAIN_S
    harness.tick(AGAIN_S)
    assert not harness.device.shared
    assert harness.scheduler.wake_at > harness.now + 2 * AGAIN_S
    harness.drain()


def test_a_deletion_leaves_the_keys_of_an_opening_that_another_conversation_has():
    harness = SharedHarness()
    harness.turn(PROMPT, 1)
    harness.run_until(lambda: len(harness.device.shared) == 4 and not harness.scheduler.lower.busy)
    lower = harness.scheduler.lower
    all_keys = list(lower.keys(array("i", PROMPT), b""))
    lower.erase(lower.keys(array("i", PROMPT), b"", 8))
    harness.run_until(lambda: not lower.busy)
    assert lower.take_erased() == [Erasure.WHOLLY]
    assert list(harness.device.shared) == all_keys[:2]
    harness.drain()


def test_a_deletion_does_not_wait_for_a_late_write():
    harness = SharedHarness()
    harness.turn(PROMPT, 1, "a")
    harness.ends = False
    harness.run_until(lambda: len(moves(harness, Spill)) == 4)
    deleted = set(harness.scheduler.conversations.get("a").keys)
    harness.delete("a")
    harness.late = moves(harness, Spill)
    harness.run_until(lambda: harness.scheduler.lower.take_erased() == [Erasure.LATER])
    harness.ends = True
    harness.turn(range(50, 60), 1)
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert deleted <= harness.device.written.keys(), "the late writes have ended"
    assert not deleted & harness.device.shared.keys()
    assert not harness.scheduler._store.shared._unwanted
    harness.drain()


def test_a_write_that_hangs_keeps_no_reply_back():
    harness = SharedHarness(save="sync", disk_kv_chunks=20)
    harness.scheduler._write_behind._most_writes = 1  # the store is faster
    harness.ends = False
    request = harness.submit(PROMPT, 1)
    for _ in range(30):
        harness.tick()
        harness.late = moves(harness, Spill)
    assert harness.late and request not in harness.open
    harness.ends = True
    harness.drain()


def test_a_chunk_is_written_once_after_two_finds():
    harness = SharedHarness()
    sharing = harness.scheduler._sharing
    tier = harness.scheduler._store.shared
    harness.answers = False
    harness.turn(PROMPT, 1, "a")
    chunks = harness.scheduler.conversations.get("a").chunks
    tier.paused_until = harness.now + 1.0  # a write has failed: all are declined
    harness.turn(range(40, 50), 1)
    harness.now += 2.0
    sharing.turn_ended(chunks, harness.now)
    harness.answers = True
    harness.run_until(lambda: not harness.scheduler.lower.unfinished)
    assert set(harness.device.written) >= {chunk.key for chunk in chunks}
    harness.drain()


def test_nothing_is_planned_while_only_late_writes_are_left():
    harness = SharedHarness()
    harness.turn(PROMPT, 1)
    harness.ends = False
    harness.run_until(lambda: len(moves(harness, Spill)) == 4)
    harness.late = moves(harness, Spill)
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert harness.scheduler._store.host.free == 26
    harness.ends = True
    harness.turn(range(50, 54), 1)
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert harness.scheduler._store.host.free == 30, "copies for the store alone"
    harness.drain()


def test_a_stop_writes_what_is_on_the_host_and_not_in_the_store():
    harness = SharedHarness()
    tier = harness.scheduler._store.shared
    tier.paused_until = 100.0  # a write has failed
    harness.turn(PROMPT, 1, "a")
    harness.turn(range(40, 58), 1, "b")
    chunks = harness.scheduler.conversations.get("a").chunks
    for chunk in chunks:
        harness.place(chunk, "host")
    assert not harness.scheduler.lower.unfinished
    harness.now = 101.0
    harness.scheduler.stop(harness.now)
    assert harness.scheduler.lower.unfinished
    harness.run_until(lambda: not harness.scheduler.lower.unfinished)
    assert harness.device.shared.keys() == {chunk.key for chunk in chunks}
    harness.drain()


# -- long answers

SMALL_PIECES = ((1, 1), (5, 2))  # keys of a plan, and of a piece


def taken_by(monkeypatch, keys, piece):
    monkeypatch.setattr(sharing, "KEYS_A_PLAN", keys)
    monkeypatch.setattr(sharing, "LARGEST_PIECE", piece)


def learned(harness):
    """The number of `learn` calls of each plan from now on, as a growing list."""
    counts = []
    take = harness.scheduler._sharing.take_answers
    learn = harness.scheduler._store.learn

    def counted_take(now):
        counts.append(0)
        take(now)

    def counted_learn(*of):
        counts[-1] += 1
        return learn(*of)

    harness.scheduler._sharing.take_answers = counted_take
    harness.scheduler._store.learn = counted_learn
    return counts


@pytest.mark.parametrize(("keys", "piece"), SMALL_PIECES)
def test_a_long_answer_is_taken_in_pieces_with_the_same_end(monkeypatch, keys, piece):
    """As at once: all is read, nothing is written again, and no key is learned twice."""
    at_once = written(prompt=LONG)
    assert at_once.turn(LONG, 1)["shared"] == 48
    taken_by(monkeypatch, keys, piece)
    harness = written(prompt=LONG)
    assert harness.device.shared == at_once.device.shared
    counts = learned(harness)
    assert harness.turn(LONG, 1)["shared"] == 48
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert sum(counts) == 12 and max(counts) <= keys + piece
    assert harness.counts["shared spilled"] == 12
    assert not harness.scheduler._sharing._waiting
    harness.drain()


@pytest.mark.parametrize("there", [True, False])
def test_the_chunks_of_a_long_turn_are_written_once_or_known_to_be_there(monkeypatch, there):
    taken_by(monkeypatch, 2, 1)
    harness = written(prompt=LONG) if there else SharedHarness()
    before = harness.counts["shared spilled"]
    harness.scheduler._sharing._least = 1000  # the prompt is computed
    request = harness.submit(LONG, 1)
    harness.run_until(lambda: harness.state(request) == "running")
    harness.scheduler._sharing._least = 8
    harness.run(request)
    assert harness.scheduler.lower.unfinished
    harness.run_until(lambda: not harness.scheduler.lower.unfinished)
    assert harness.counts["shared spilled"] - before == (0 if there else 12)
    assert len(harness.device.shared) == 12
    harness.drain()


def test_a_request_waits_for_the_rest_of_its_answer_however_long_that_takes(monkeypatch):
    harness = written(prompt=LONG)
    taken_by(monkeypatch, 1, 1)
    began = harness.now
    request = harness.submit(LONG, 1)
    while harness.state(request) == "waiting" and not moves(harness, Promotion):
        harness.tick(0.01)
    assert harness.now - began > 0.1
    harness.run()
    assert harness.counts["shared tokens"] == 48
    harness.drain()


def test_a_short_answer_does_not_wait_for_a_long_one(monkeypatch):
    harness = written(prompt=LONG)
    short = range(100, 118)
    harness.turn(short, 1)
    harness.run_until(lambda: len(harness.device.shared) == 16 and not harness.scheduler.lower.busy)
    harness.lose(lambda idle: idle)
    taken_by(monkeypatch, 2, 1)
    long_request, short_request = harness.submit(LONG, 1), harness.submit(short, 1)
    harness.run(short_request)
    assert harness.state(long_request) == "waiting"
    harness.run()
    assert harness.counts["shared tokens"] == 64
    harness.drain()


def test_the_rest_of_an_answer_for_a_request_that_has_left_is_not_taken(monkeypatch):
    harness = written(prompt=LONG)
    taken_by(monkeypatch, 2, 1)
    counts = learned(harness)
    request = harness.submit(LONG, 1)
    harness.run_until(lambda: sum(counts) >= 4)
    harness.abort(request)
    harness.run_until(lambda: not harness.scheduler.lower.busy)
    assert sum(counts) < 12 and not harness.scheduler._sharing._waiting
    assert not [*harness.scheduler._store.resident_chunks()], "only the store has them"
    assert harness.turn(LONG, 1)["shared"] == 48
    harness.drain()


def test_a_plan_removes_few_keys_again(monkeypatch):
    monkeypatch.setattr(shared_tier, "REMOVED_AGAIN", 5)
    tier = SharedHarness().scheduler._store.shared
    keys = [bytes([number]) * 32 for number in range(12)]
    tier._again.extend((0.0, key) for key in keys)
    removed = []
    for _ in range(3):
        tier.remove_again(1.0)
        batches = [batch.keys for batch in tier.hand_over(1).removals]
        assert [len(batch) <= 5 for batch in batches] == [True]
        removed += batches[0]
    assert removed == keys and not tier._again


RUNS = [
    {
        "seed": seed,
        "gpu_kv_chunks": (18, 24, 72)[seed % 3],
        "host_kv_chunks": (16, 60)[seed % 2],
        "disk_kv_chunks": (0, 20, 90)[seed // 2 % 3],
        "eviction": ("lru", "retention")[seed // 3 % 2],
        "save": ("async", "async", "sync")[seed % 3],
        "copies_may_fail": seed % 4 == 3,
        "overflow_ratio": (0.5, 0.25)[seed // 4 % 2],
    }
    for seed in range(16)
]
totals = Counter()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run["seed"]))
def test_random_operations(run, monkeypatch):
    if run["seed"] % 2:
        taken_by(monkeypatch, 3, 2)
    SharedDriver(**run).play(1000, totals)


@pytest.mark.parametrize(
    "event",
    ["shared tokens", "shared spilled", "shared promoted", "shared failed", "late", "late writers"],
)
def test_the_random_operations_reach(event):
    if totals["runs"] == len(RUNS):
        assert totals[event] > 20
