"""Waits that must end: for the disk, for prefetches, for outputs that are kept back, and for
deletions."""

from array import array

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.kv.chunk_keys import NO_KEY
from pensieve.scheduler.kv.disk_tier import ERASE_AGAIN_S, DiskTier
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import GPU, HOST, Erasure, Tier
from pensieve.scheduler.work import WORK_A_STEP

from .device_model import disk_report, disk_work
from .harness import Harness, profile
from .kv.test_disk_tier import only_on_disk
from .test_state_machine import SlowDisk

pytestmark = pytest.mark.usefixtures("each_lower_tier")


def rest(harness):
    for _ in range(50):
        harness.tick()


def records(harness, keys):
    return [slot for slot, (key, *_) in harness.device.disk.items() if key in keys]


def test_an_end_that_is_kept_back_counts_as_saving():
    """Else a server that shuts down would end between the decision and the telling."""
    harness = Harness(disk_kv_chunks=1, save="sync")
    harness.submit(range(20), 4, "c")
    for _ in range(40):
        harness.now += 0.01
        harness.launch()
        scheduler = harness.scheduler
        if not scheduler.open_requests() and scheduler._write_behind.withholds:
            assert scheduler.lower.unfinished
        harness.apply()
        if not harness.open:
            return
    raise AssertionError("the end never came")


def test_a_conversations_time_begins_when_its_end_is_told():
    """A conversation whose end is kept back cannot be continued, even if the disk takes long."""
    harness = SlowDisk(disk_kv_chunks=60, save="sync", conversation_ttl=100.0)
    request = harness.submit(range(20), 4, "c")
    for _ in range(20):
        harness.tick()
        harness.now += 10.0
    assert harness.state(request) == "saving" and "c" in harness.scheduler.conversations
    harness.in_time = True
    while request in harness.open:
        harness.tick()
    harness.now += 90.0
    harness.tick()
    assert "c" in harness.scheduler.conversations
    harness.now += 20.0
    harness.tick()
    assert "c" not in harness.scheduler.conversations


def test_what_is_expected_and_has_no_room_does_not_keep_the_loop_busy():
    harness = Harness(host_kv_chunks=4, disk_kv_chunks=60)
    harness.turn(range(40), 4, "c", expect_next_s=5.0)
    while harness.tick():
        pass
    store = harness.scheduler._store
    for chunk in list(harness.scheduler.conversations.get("c").chunks):
        assert chunk.slots[Tier.DISK] >= 0
        if chunk.slots[HOST] >= 0:
            store.release_host(chunk)
        if chunk.slots[GPU] >= 0:
            store.release_gpu(chunk)
    harness.now += 10
    plans = [harness.tick() for _ in range(200)]
    assert harness.counts["promoted"] and plans[-1] is None and not harness.scheduler.lower.busy


def test_a_turn_without_a_hint_takes_back_the_one_before():
    harness = Harness(disk_kv_chunks=60)
    harness.turn(range(16), 4, "c", expect_next_s=500.0)
    assert harness.scheduler.wake_at < harness.now + 500
    harness.turn([*harness.logs["c"], 3], 4, "c")
    assert not list(harness.scheduler.conversations.expected.take(harness.now + 1000))


def test_a_deletion_reaches_what_is_being_written():
    harness = SlowDisk(disk_kv_chunks=60)
    prompt = list(range(16))
    harness.turn(prompt, 4, "c")
    for _ in range(5):
        harness.tick()
    assert harness.device.work
    request = harness.submit([*prompt, 50], 8, "c")
    harness.tick()
    harness.tick()
    assert harness.state(request) == "running"
    keys = list(harness.scheduler.lower.keys(harness.logs["c"], b""))
    harness.delete("c")
    harness.in_time = True
    for _ in range(3):
        harness.tick()
    if request in harness.open:
        harness.abort(request)
    rest(harness)
    assert not records(harness, keys)


def suspended(harness):
    """A turn that waits to go on, and whose length may be confirmed meanwhile."""
    request = harness.submit(range(24), 20, "c", confirm=True)
    for _ in range(6):
        harness.tick()
    queues = harness.scheduler._queues
    queues.suspend(queues.rows[0])
    for _ in range(3):
        if harness.results:
            harness.apply()
    queues.release_suspended(harness.scheduler._applied, harness.now)
    assert harness.state(request) == "suspended"
    return request


def test_the_end_of_a_suspended_turn_is_kept_back_too():
    harness = SlowDisk(disk_kv_chunks=60, save="sync")
    request = suspended(harness)
    assert harness.scheduler.finish(request, 1, harness.now) is None
    keys = list(harness.scheduler.lower.keys(harness.scheduler.conversations.tokens("c"), b""))
    for _ in range(20):
        harness.tick()
    assert harness.device.work and request not in harness.held
    harness.in_time = True
    rest(harness)
    assert request in harness.held and len(records(harness, keys)) == len(keys)


def test_a_deletion_reaches_what_lies_behind_a_hole():
    """A turn was ended while suspended, and one of its chunks was gone."""
    harness = Harness(disk_kv_chunks=60)
    request = suspended(harness)
    queues = harness.scheduler._queues
    keys = list(queues.waiting[0].keys)[:6]
    harness.lose(lambda idle: [chunk for chunk in idle if chunk.key == keys[1]])
    harness.finish(request, 1)
    rest(harness)
    harness.delete("c")
    rest(harness)
    assert not records(harness, keys) and not any(map(harness.scheduler._store.find, keys))


def test_keys_of_a_log_that_outgrew_its_context_are_looked_for_a_few_at_a_time():
    """Their number is the square of the log's length, which must burden neither the loop nor
    memory."""
    config = SchedulerConfig(64, 16, 64, chunk_tokens=4, disk_kv_chunks=32, overflow="keep")
    scheduler = Scheduler(config, profile())
    log = array("i", range(4000))
    scheduler.lower.erase(scheduler.lower.keys(log, b""))
    assert scheduler.lower.unfinished
    plans = 0
    while scheduler.lower.unfinished:
        scheduler.next_plan(0.0)
        plans += 1
    (windows,) = [config.windows]
    share = WORK_A_STEP * 4 // 6 // 2  # the rest is for others; a key is made and looked up
    expected = sum((len(log) - base) // 4 for base in range(0, len(log), windows.step)) // share
    assert expected - 5 <= plans <= expected + 5


@pytest.mark.parametrize("shared", [0, 60, 3999])
def test_keys_made_one_by_one_are_those_of_whole_chains(shared):
    scheduler = Scheduler(SchedulerConfig(64, 16, 64, chunk_tokens=4, overflow="keep"), profile())
    log = array("i", range(500))
    expected = []
    for base in range(0, scheduler._chunk_keys.first_seen(len(log)) + 1, scheduler._windows.step):
        chain = []
        scheduler._chunk_keys.extend(chain, base, b"", log, len(log))
        expected += chain[max(base, shared) // 4 :]
    keys = list(scheduler.lower.keys(log, b"", shared))
    assert [key for key in keys if key != NO_KEY] == expected


def test_a_deletion_has_ended_when_its_records_are_erased():
    """Also if a spill might have taken the slot: a record that is overwritten without a flush
    returns after a power failure."""
    harness = Harness(disk_kv_chunks=8, host_kv_chunks=8)
    harness.turn(range(16), 4, "a")
    rest(harness)
    scheduler = harness.scheduler
    slots = set(harness.device.disk)
    harness.delete("a")
    assert scheduler.lower.take_erased() == [] and scheduler.lower.unfinished
    scheduler.lower.erase([b"unknown"])
    assert scheduler.lower.take_erased() == [], "in their order"
    harness.submit(range(50, 66), 4, "b")
    harness.launch()
    assert slots and slots == set(harness.device.erased) and scheduler.lower.take_erased() == []
    harness.apply()
    assert scheduler.lower.take_erased() == [Erasure.WHOLLY, Erasure.WHOLLY]
    rest(harness)
    assert not scheduler.lower.unfinished


def test_a_slot_that_cannot_be_erased_is_used_no_more():
    harness = Harness(disk_kv_chunks=8)
    harness.turn(range(16), 4, "a")
    rest(harness)
    scheduler = harness.scheduler
    slots = tuple(harness.device.disk)
    scheduler.conversations.delete("a")
    plan = scheduler.next_plan(harness.now)
    assert sorted(disk_work(plan).erased) == sorted(slots)
    scheduler.apply(
        StepResult(
            plan.step, (), (), scheduler._store.completed, lower=disk_report(erase_failed=slots[:1])
        ),
        harness.now,
    )
    assert scheduler.lower.take_erased() == [Erasure.REFUSED]
    scheduler.check()
    assert scheduler.stats().slots["disk"] == {"free": 7, "copy": 0, "idle": 0, "moving": 1}
    scheduler.lower.erase([])
    assert scheduler.lower.take_erased() == [Erasure.WHOLLY], "what was lost before is not its own"


def test_a_slot_that_could_not_be_erased_is_erased_again_later():
    """A full disk refuses erasures too. It must not cost slots until the next start."""
    harness = Harness(disk_kv_chunks=8)
    if not isinstance(harness.scheduler._store.lower[0], DiskTier):
        pytest.skip("a dict has no slot that stays bad")
    harness.turn(range(16), 4, "a")
    rest(harness)
    scheduler = harness.scheduler
    records = len(harness.device.disk)
    harness.device.erases = lambda: False
    harness.delete("a")
    rest(harness)
    assert scheduler.lower.take_erased() == [Erasure.REFUSED]
    assert scheduler.stats().slots["disk"]["free"] == 8 - records and harness.device.disk
    harness.device.erases = lambda: True
    harness.now += ERASE_AGAIN_S
    harness.turn(range(50, 52), 1, "b")
    rest(harness)
    scheduler.check()
    assert scheduler.stats().slots["disk"]["free"] == 8 and not harness.device.disk


def test_a_deletion_reaches_a_record_that_is_being_read_for_a_chunk_that_was_computed_again():
    harness = SlowDisk(disk_kv_chunks=60, check=False)
    harness.in_time = True
    prompt = only_on_disk(harness)
    harness.in_time = False
    keys = list(harness.scheduler.lower.keys(harness.logs["a"], b""))
    waiting = harness.submit(prompt, 4, "a")
    harness.tick()
    assert harness.device.work
    harness.abort(waiting)
    store = harness.scheduler._store
    chunk = store.find(keys[0])
    # some row's
    assert store.publish(store.new(chunk.end, harness.now), keys[0]) is chunk and chunk.users == 1
    harness.delete("a")
    harness.in_time = True
    rest(harness)
    assert not records(harness, keys) and harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]


def evicted(harness):
    """The keys and DISK slots of conversation a, whose records have been given up since the last
    plan."""
    harness.turn(range(16), 4, "a")
    rest(harness)
    store = harness.scheduler._store
    keys = list(harness.scheduler.lower.keys(harness.logs["a"], b""))[:4]
    slots = records(harness, keys)
    assert len(slots) == len(keys)
    for key in keys:
        store.drop(store.find(key))
    return keys, slots


@pytest.mark.parametrize("when", ["vacated", "erasing", "lost"])
def test_a_deletion_knows_of_a_record_that_was_evicted_and_cannot_be_erased(when):
    harness = Harness(disk_kv_chunks=8)
    keys, slots = evicted(harness)
    left = harness.device.disk[slots[0]][0]
    scheduler = harness.scheduler
    if when == "vacated":
        harness.delete("a")
    plan = scheduler.next_plan(harness.now)
    assert sorted(disk_work(plan).erased) == sorted(slots)
    if when == "erasing":
        harness.delete("a")
    assert scheduler.lower.take_erased() == []
    result = StepResult(
        plan.step, (), (), scheduler._store.completed, lower=disk_report(erase_failed=(slots[0],))
    )
    scheduler.apply(result, harness.now)
    if when == "lost":
        harness.delete("a")
    assert scheduler.lower.take_erased() == [Erasure.REFUSED]
    scheduler.check()
    scheduler.lower.erase([left])
    scheduler.lower.erase(key for key in keys if key != left)
    assert scheduler.lower.take_erased() == [Erasure.REFUSED, Erasure.WHOLLY]


def test_a_deletion_reaches_an_evicted_record_that_is_not_overwritten_yet():
    """Else it comes back if the process is killed before, or if the write fails and the slot cannot
    be erased."""
    harness = SlowDisk(disk_kv_chunks=4)
    if not isinstance(harness.scheduler._store.lower[0], DiskTier):
        pytest.skip("a dict overwrites no record")
    harness.in_time = True
    only_on_disk(harness)
    keys = list(harness.scheduler.lower.keys(harness.logs["a"], b""))
    harness.in_time = False
    harness.submit(range(50, 66), 4, "b")
    while len(harness.device.work) < 4:
        harness.tick()
    assert len(records(harness, keys)) == 4
    harness.delete("a")
    rest(harness)
    assert harness.scheduler.lower.take_erased() == []
    harness.in_time = True
    rest(harness)
    assert not records(harness, keys) and harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]


@pytest.mark.parametrize("spills", [True, False])
def test_a_deletion_reaches_a_record_whose_chunk_was_dropped_while_it_was_moving(spills):
    harness = SlowDisk(disk_kv_chunks=60)
    harness.in_time = not spills
    prompt = range(18)
    if spills:
        harness.turn(prompt, 2, "a")
    else:
        harness.submit(only_on_disk(harness), 4, "b")
        harness.in_time = False
    while not harness.device.work:
        harness.tick()
    keys = list(harness.scheduler.lower.keys(harness.logs["a"], b""))
    store = harness.scheduler._store
    slots = list(harness.device.work)
    for request in list(harness.open):
        harness.abort(request)
    for key in keys:
        if (chunk := store.find(key)) is not None and not chunk.users:
            store.drop(chunk)
    harness.delete("a")
    rest(harness)
    assert slots and harness.scheduler.lower.take_erased() == []
    harness.in_time = True
    rest(harness)
    assert not records(harness, keys) and harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]


def test_of_a_reply_cut_where_a_chunk_ends_that_chunk_is_erased_too():
    """The row had gone on, so the log's last token has KV as well: its chunk is full, and was
    saved."""
    harness = Harness(disk_kv_chunks=60)
    request = harness.submit(range(13), 12, "a", confirm=True)
    harness.run(request)
    harness.finish(request, 3)
    rest(harness)
    keys = list(harness.scheduler.lower.keys(harness.logs["a"], b""))
    assert len(records(harness, keys)) == len(keys) == 4
    harness.delete("a")
    rest(harness)
    assert not records(harness, keys)
