"""The third tier: the order of writes, the order of reads, and records that are never read again.
The device model below checks every slot and every token; the tests check further conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.disk_tier import BACKOFF_S
from pensieve.scheduler.plan import Spill, StepResult
from pensieve.scheduler.types import GPU, HOST, InvariantError, RequestError, StoredRecord, Tier

from ..device_model import disk_report, disk_work
from ..harness import Harness
from ..stories import TIGHT
from ..test_state_machine import SlowDisk

pytestmark = pytest.mark.usefixtures("each_lower_tier")

DISK = TIGHT | {"host_kv_chunks": 16, "disk_kv_chunks": 64}


def settle(harness):
    """Runs until no chunk is on its way to or from DISK."""
    while harness.scheduler.lower.busy:
        harness.tick()


def chunks_of(harness, name="a"):
    return harness.scheduler.conversations.get(name).chunks


def only_on_disk(harness, name="a", tokens=18, first=0):
    """A conversation whose four full chunks are nowhere else. Returns its next prompt."""
    harness.turn(range(first, first + tokens), 2, name)
    settle(harness)
    store = harness.scheduler._store
    for chunk in chunks_of(harness, name):
        assert chunk.slots[Tier.DISK] != NO_SLOT
        store.release_gpu(chunk)
        if chunk.slots[HOST] != NO_SLOT:
            store.release_host(chunk)
    store.drop(harness.scheduler.conversations.get(name).tail)
    harness.check()
    return [*harness.logs[name], 7, 8]


def records(harness):
    return {key for key, _, _ in harness.device.disk.values()}


# -- saving


def test_an_ended_turn_is_on_disk_soon_but_for_its_tail():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a")
    assert harness.scheduler.lower.unfinished
    settle(harness)
    assert not harness.scheduler.lower.unfinished
    assert records(harness) == set(harness.scheduler.conversations.get("a").keys)
    ends = sorted(end for _, end, _ in harness.device.disk.values())
    assert ends == [4, 8, 12, 16]
    assert all(chunk.slots[GPU] != NO_SLOT for chunk in chunks_of(harness)), (
        "it goes on as it was on the GPU"
    )
    harness.drain()


def test_what_is_on_disk_already_is_not_written_again():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a")
    settle(harness)
    harness.turn([*harness.logs["a"], 5], 5, "a")
    settle(harness)
    assert harness.counts["spilled"] == len(chunks_of(harness)) == 6
    harness.drain()


def test_a_chunk_is_written_only_when_its_copy_out_is_known_to_be_complete():
    harness = Harness(**DISK)
    harness.completes = lambda: False
    harness.turn(range(18), 2, "a")
    for _ in range(9):
        harness.tick()
    assert (
        any(chunk.slots[HOST] != NO_SLOT for chunk in chunks_of(harness))
        and not harness.counts["spilled"]
    )
    assert harness.scheduler.lower.unfinished, "and plans go on asking for results"
    del harness.completes
    settle(harness)
    assert harness.counts["spilled"] == 4
    harness.drain()


def test_what_is_on_host_already_does_not_wait_for_the_links_share():
    """A step copies one chunk out. If chunks that need no copy counted too, the queue would grow
    whenever turns end faster than that, and the chunks saved last would be gone by then."""
    harness = SlowDisk(chunks_a_step=1, **DISK)
    harness.turn(range(18), 2, "a")
    for chunk in chunks_of(harness):
        if chunk.slots[HOST] == NO_SLOT:
            harness.place(chunk, "both")
    harness.tick()
    harness.tick()
    assert len(harness.device.work) == 4
    harness.in_time = True
    harness.drain()


def test_without_eager_saving_only_what_host_gives_up_is_written():
    harness = Harness(**DISK | {"save": "off", "host_kv_chunks": 6})
    harness.turn(range(18), 2, "a")
    settle(harness)
    assert not harness.device.disk
    for number in range(1, 6):
        harness.turn(range(100 * number, 100 * number + 34), 2, f"c{number}")
    settle(harness)
    assert harness.counts["spilled"] and harness.scheduler.stats().evictions["host"]["reclaimed"]
    harness.drain()


def test_in_time_means_before_the_last_event():
    harness = SlowDisk(**DISK | {"save": "sync"})
    request = harness.submit(range(18), 2, "a")
    for _ in range(20):
        harness.tick()
    assert request in harness.open and len(harness.reply(request)) == 2, (
        "it has its tokens, and its end is kept back"
    )
    while request in harness.open:
        harness.done.update(dict.fromkeys(harness.device.work, True))
        harness.tick()
    assert len(harness.device.disk) == 4
    harness.in_time = True
    harness.drain()


def test_a_failed_write_stops_spilling_for_some_seconds_and_the_turn_ends_all_the_same():
    harness = SlowDisk(**DISK | {"save": "sync"})
    request = harness.submit(range(18), 2, "a")
    while request in harness.open:
        harness.done.update(dict.fromkeys(harness.device.work, False))
        harness.tick()
    stats = harness.scheduler.stats()
    disk = harness.scheduler._store.lower[0]
    assert (
        disk.paused_until > harness.now
        and stats.failed_writes == 4
        and stats.slots["disk"]["free"] >= 63  # one may still be being erased
    )
    harness.in_time = True
    harness.turn(range(30, 48), 2, "b")
    assert not harness.counts["spilled"]
    harness.now += BACKOFF_S
    harness.turn(range(60, 78), 2, "c")
    assert harness.counts["spilled"] == 4
    harness.drain()


def test_a_swap_in_may_read_a_slot_that_is_being_spilled_and_no_chunk_may_take_it():
    harness = SlowDisk(**DISK | {"host_kv_chunks": 4})
    harness.turn(range(16), 1, "a")
    while len(harness.device.work) < 3:
        harness.tick()
    spilling = [chunk for chunk in chunks_of(harness) if chunk.moving]
    for chunk in spilling:
        harness.scheduler._store.release_gpu(chunk)
    usage = harness.turn([*harness.logs["a"], 5], 1, "a")
    assert usage["host"] == 4 * len(spilling)
    harness.turn(range(100, 160), 3)
    assert all(chunk.slots[HOST] != NO_SLOT for chunk in spilling), (
        "the device model would have seen worse"
    )
    harness.in_time = True
    harness.drain()


# -- reading


def test_a_history_on_disk_is_read_while_others_generate():
    harness = SlowDisk(**DISK)
    harness.in_time = True
    prompt = only_on_disk(harness)
    harness.in_time = False
    other = harness.submit(range(60, 64), 30)
    harness.tick()
    request = harness.submit(prompt, 4, "a")
    before = len(harness.reply(other))
    for _ in range(6):
        harness.tick()
    assert harness.state(request) == "waiting" and len(harness.reply(other)) > before + 4
    assert len([work for work in harness.device.work.values() if not isinstance(work, Spill)]) == 4
    harness.in_time = True
    harness.run(request)
    assert harness.counts["disk tokens"] == 16
    harness.drain()


def test_a_restart_finds_what_was_written():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a")
    settle(harness)
    log = harness.logs["a"]
    harness.restart()
    assert harness.turn([*log, 5], 3, "a") == {"disk": 16, "new": 5}
    harness.drain()


def test_a_failed_read_means_computing_again():
    harness = SlowDisk(**DISK)
    harness.in_time = True
    prompt = only_on_disk(harness)
    harness.in_time = False
    request = harness.submit(prompt, 4, "a")
    harness.tick()
    bad, *good = harness.device.work
    harness.done = {bad: False} | dict.fromkeys(good, True)
    harness.run(request)
    assert (harness.counts["disk tokens"], harness.scheduler.stats().failed_reads) == (12, 1)
    assert bad not in harness.device.disk
    harness.in_time = True
    harness.drain()


def test_where_host_has_no_room_the_history_is_computed():
    harness = Harness(check=False, **DISK)
    prompt = only_on_disk(harness)
    store = harness.scheduler._store
    taken = [store.host.take() for _ in range(store.host.free)]
    assert harness.turn(prompt, 1, "a") == {"recomputed": 19, "new": 3}
    for slot in taken:
        store.host.give(slot)
    harness.drain()


@pytest.mark.parametrize(("bytes_per_s", "usage"), [(1e9, {"disk": 16}), (1e3, {"recomputed": 16})])
def test_a_slow_disk_is_not_waited_for(bytes_per_s, usage):
    harness = Harness(**DISK)
    harness._cost = replace(harness._cost, disk_read_bytes_per_s=bytes_per_s)
    harness.turn(range(18), 2, "a")
    settle(harness)
    log = harness.logs["a"]
    harness.restart()
    assert harness.turn([*log, 5], 1, "a") == usage | {"new": 5}
    harness.drain()


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_is_read_ahead_of_its_turn_counts_as_found_on_host(prefetch):
    """One seat, taken: the next request's history is read while it waits for it, or only then."""
    harness = Harness(**DISK | {"max_num_seqs": 1, "prefetch": prefetch})
    prompt = only_on_disk(harness)
    harness.submit(range(60, 64), 12)
    harness.tick()
    assert harness.turn(prompt, 1, "a") == {("host" if prefetch else "disk"): 16, "new": 6} | {
        "recomputed": 3,
        "new": 3,
    }
    harness.drain()


@pytest.mark.parametrize("order", ["bounded-ratio", "arrival"])
def test_the_request_that_joins_first_is_prefetched_first(order):
    """One seat, taken, and room on HOST for one history: a short turn is to pass a long one that
    came before it."""
    harness = Harness(**DISK | {"max_num_seqs": 1, "host_kv_chunks": 9, "queue_order": order})
    prompts = {
        name: only_on_disk(harness, name, first=first)
        for name, first in (("long", 0), ("short", 100))
    }
    harness.submit(range(60, 64), 12)
    harness.tick()
    harness.submit([*prompts["long"], *range(200, 212)], 1, "long")
    harness.submit(prompts["short"], 1, "short")
    harness.now += 0.1
    for _ in range(4):
        harness.tick()
    there = {
        name: all(chunk.slots[HOST] != NO_SLOT for chunk in chunks_of(harness, name))
        for name in prompts
    }
    assert there == {"long": order == "arrival", "short": order == "bounded-ratio"}
    harness.drain()


def test_a_client_that_tells_when_it_comes_back_finds_its_history_on_host():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a", expect_next_s=30.0)
    settle(harness)
    for chunk in chunks_of(harness):
        harness.scheduler._store.release_gpu(chunk)
    assert harness.now + 25 < harness.scheduler.wake_at < harness.now + 30
    assert not harness.tick()
    harness.now = harness.scheduler.wake_at
    settle(harness)
    harness.tick()
    settle(harness)
    assert all(chunk.slots[HOST] != NO_SLOT for chunk in chunks_of(harness))
    harness.drain()
    with pytest.raises(RequestError, match="expect_next_s"):
        harness.submit(range(4), expect_next_s=-1.0)


# -- never read again


def test_a_deleted_conversation_is_erased_but_for_what_others_claim():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a")
    harness.turn([*range(8), *range(50, 60)], 2, "b")
    settle(harness)
    kept = set(harness.scheduler.conversations.get("b").keys)
    gone = harness.scheduler.conversations.get("a").keys[2:]
    harness.delete("a")
    assert not any(harness.scheduler._store.find(key) for key in gone)
    harness.tick()
    assert records(harness) == kept
    harness.drain()


def test_a_conversation_deleted_while_it_is_written_is_erased_when_it_is_written():
    harness = SlowDisk(**DISK)
    harness.turn(range(18), 2, "a")
    while len(harness.device.work) < 4:
        harness.tick()
    harness.delete("a")
    harness.check()
    assert harness.scheduler.stats().slots["host"]["moving"] == 4
    harness.done = dict.fromkeys(harness.device.work, True)
    for _ in range(3):
        harness.tick()
    assert not harness.device.disk and not harness.device.work
    assert harness.scheduler.stats().slots["disk"]["free"] == 64
    harness.drain()


def test_a_conversation_deleted_while_it_is_read_is_erased_too():
    harness = SlowDisk(**DISK)
    harness.in_time = True
    prompt = only_on_disk(harness)
    harness.in_time = False
    request = harness.submit(prompt, 4, "a")
    harness.tick()
    assert len(harness.device.work) == 4
    harness.abort(request)
    harness.delete("a")
    harness.done = dict.fromkeys(harness.device.work, True)
    for _ in range(3):
        harness.tick()
    assert not harness.device.disk
    harness.in_time = True
    harness.drain()


def test_the_end_of_a_conversations_time_erases_it():
    harness = Harness(**DISK | {"conversation_ttl": 100.0})
    harness.turn(range(18), 2, "a")
    harness.lives["a"] = (harness.now, 100.0)
    settle(harness)
    assert len(harness.device.disk) == 4 and harness.scheduler.wake_at <= harness.now + 100.0
    harness.now += 101.0
    harness.tick()
    assert not harness.device.disk
    harness.drain()


def test_a_conversation_of_an_earlier_life_is_erased_by_its_keys():
    harness = Harness(**DISK)
    harness.turn(range(18), 2, "a")
    harness.turn(range(50, 68), 2, "b")
    settle(harness)
    log = harness.logs["a"]
    keys = harness.scheduler.conversations.get("b").keys
    harness.restart()
    harness.scheduler.lower.erase(harness.scheduler.lower.keys(log, b""))
    harness.tick()
    assert records(harness) == set(keys)
    assert harness.turn([*log, 5], 1) == {"recomputed": 16, "new": 5}
    harness.drain()


def test_adopted_records_are_each_in_a_slot_of_their_own_and_the_first_of_a_key_counts():
    harness = Harness(**DISK)
    scheduler = harness.scheduler
    scheduler.lower.adopt(
        {Tier.DISK: [StoredRecord(3, b"one", 4, 5.0), StoredRecord(9, b"one", 4, 1.0)]}, now=100.0
    )
    harness.check()
    assert (
        scheduler._store.find(b"one").slots[Tier.DISK],
        scheduler._store.find(b"one").last_active,
    ) == (
        3,
        95.0,
    )
    assert disk_work(scheduler.next_plan(100.0)).erased == (9,)
    for slot in (64, 3):
        with pytest.raises(InvariantError, match="slot"):
            Harness(**DISK).scheduler.lower.adopt(
                {Tier.DISK: [StoredRecord(3, b"one", 4, 1.0), StoredRecord(slot, b"two", 4, 1.0)]},
                0.0,
            )
    with pytest.raises(InvariantError, match="no such work"):
        scheduler.apply(StepResult(1, (), (), lower=disk_report(spilled=(1,))), 100.0)
