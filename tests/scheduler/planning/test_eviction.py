"""Making room: the victims, their order, and the chunks that are never given up for it."""

from __future__ import annotations

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.planning.promotions import promote
from pensieve.scheduler.planning.spills import spill, spill_ahead
from pensieve.scheduler.types import GPU, HOST, InvariantError, Tier

from ..harness import Harness
from ..stores import SIZE, a_store, an_evictor, check, idle, in_use, record


def test_slots_that_cost_nothing_go_first():
    """The free one, the copied one, the refused_by_host one; the only copy goes last although its
    value is lowest."""
    store = a_store(gpu=4, host=4)
    only, copied, refused_by_host = (
        idle(store, now=0.0),
        idle(store, now=5.0, copied=True),
        idle(store, now=6.0),
    )
    refused_by_host.refused_by_host = True
    store.update_victim_set(refused_by_host)
    copies, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(2)
    assert (
        copied.slots[GPU] == NO_SLOT and copied.slots[HOST] != NO_SLOT and refused_by_host.resident
    )
    evictor.take_gpu_slots(3)
    assert not refused_by_host.resident and only.slots[GPU] != NO_SLOT and not copies.batches()
    evictor.take_gpu_slots(4)
    assert (
        only.slots[GPU] == NO_SLOT
        and only.slots[HOST] != NO_SLOT
        and len(copies.evictions.sources) == 1
    )
    check(store)


def test_the_only_copy_is_dropped_when_host_holds_nothing_of_lower_value():
    store = a_store(gpu=1, host=1)
    worthy = idle(store, now=9.0, on_gpu=False)
    victim = idle(store, now=1.0)
    copies, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(1)
    assert not victim.resident and worthy.slots[HOST] != NO_SLOT and not copies.batches()
    check(store)


def test_a_chunk_on_host_of_lower_value_makes_room_for_one_of_higher():
    store = a_store(gpu=1, host=1)
    worthless = idle(store, now=1.0, on_gpu=False)
    victim = idle(store, now=9.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(1)
    assert not worthless.resident and victim.slots[HOST] != NO_SLOT
    check(store)


def test_a_copy_of_a_chunk_in_use_is_given_up_first():
    """It is safe on the GPU as long as its row runs, and saves only another copy."""
    store = a_store(gpu=3, host=2)
    busy = idle(store, now=9.0, copied=True)
    store.pin([busy])
    other = idle(store, now=0.0, on_gpu=False)
    victim = idle(store, now=5.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(2)
    assert (
        busy.slots[HOST] == NO_SLOT
        and busy.slots[GPU] != NO_SLOT
        and other.slots[HOST] != NO_SLOT
        and victim.slots[HOST] != NO_SLOT
    )
    check(store, held=[busy])


@pytest.mark.parametrize(("active", "displaced"), [(2.0, False), (8.0, True)])
def test_a_copy_out_never_displaces_the_copy_of_an_idle_chunk_of_lower_value(active, displaced):
    """That chunk leaves the GPU before this one does, and would be lost. One of higher value stays
    longer: its copy can go."""
    store = a_store(gpu=4, host=1)
    copied, saved = idle(store, now=active, copied=True), idle(store, now=5.0)
    copies, evictor = an_evictor(store, now=10.0)
    evictor.swap_out_ahead(available=4, most=9)
    assert (copied.slots[HOST] == NO_SLOT, saved.slots[HOST] != NO_SLOT) == (displaced, displaced)
    assert saved.refused_by_host is not displaced
    assert len(copies.swap_outs_ahead.sources) == displaced
    check(store)


def test_saving_ahead_stops_at_the_mark_at_the_link_and_at_the_last_chunk():
    for available, most, expected in ((5, 9, 1), (7, 9, 3), (8, 2, 2), (99, 99, 4)):
        store = a_store(gpu=8, host=8)
        chunks = [idle(store, end=SIZE * (1 + index), now=1.0) for index in range(4)]
        copies, evictor = an_evictor(store, now=10.0)
        evictor.swap_out_ahead(available, most)
        assert len(copies.swap_outs_ahead.sources) == expected
        assert [chunk.slots[HOST] != NO_SLOT for chunk in chunks] == [
            index < expected for index in range(4)
        ], "leading first"
        assert all(chunk.slots[GPU] != NO_SLOT for chunk in chunks), "the GPU slot stays valid"
        check(store)


@pytest.mark.parametrize("awaited", [True, False])
def test_awaited_copies_make_no_room_for_chunks_of_ended_turns(awaited):
    """HOST is full of copies of chunks that are on DISK too. The awaited ones are worth more than
    the chunk that is only on HOST, so that chunk cannot take their slots: it is dropped next,
    unless it is written to DISK before."""
    store = a_store(gpu=4, host=4, disk=8)
    for _ in range(3):
        copy = idle(store, now=1.0, on_gpu=False)
        record(store, copy)
        store.touch(copy, 1.0, place=(0, 1) if awaited else None)
    only = idle(store, now=5.0, on_gpu=False)
    _, evictor = an_evictor(store, now=10.0)
    assert spill_ahead(evictor, store.lower[0], spare=2, most=9)
    assert (only.moving is not None) is awaited
    check(store)


def test_one_plan_uses_a_host_slot_once():
    """The copies of a batch run in any order: a slot that this plan fills is not emptied and filled
    again by it."""
    store = a_store(gpu=2, host=1)
    first, second = idle(store, now=1.0), idle(store, now=9.0)
    copies, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(2)
    assert first.slots[HOST] != NO_SLOT and not second.resident
    assert list(copies.evictions.targets) == [0]
    _, evictor = an_evictor(store, now=10.0, step=2)
    third = idle(store, now=9.5)
    evictor.take_gpu_slots(2)
    assert third.slots[HOST] == 0 and not first.resident, "the next plan may"
    check(store)


@pytest.mark.parametrize("source", ["idle", "busy", "host only"])
def test_a_host_slot_that_this_plan_reads_is_not_given_away(source):
    store = a_store(gpu=3, host=1)
    chunk = idle(store, now=9.0 if source == "idle" else 1.0, copied=True)
    if source == "busy":
        store.pin([chunk])
    if source == "host only":
        store.release_gpu(chunk)
    victim = idle(store, now=5.0)
    copies, evictor = an_evictor(store, now=10.0)
    copies.early.add([chunk.slots[HOST]], [store.gpu.take()])
    evictor.swap_out_ahead(available=99, most=9)
    assert chunk.slots[HOST] == 0 and victim.slots[HOST] == NO_SLOT and victim.refused_by_host


def test_by_conversation_a_victim_takes_its_whole_turn_along():
    store = a_store(gpu=6, host=2, eviction="lru-conversation")
    turn = [idle(store, end=SIZE * (1 + index), now=1.0, copied=index < 2) for index in range(2)]
    other = idle(store, now=2.0)
    store.update_victim_set(other)
    _, evictor = an_evictor(store, now=10.0)
    evictor.take_gpu_slots(5)
    assert (
        all(chunk.slots[GPU] == NO_SLOT for chunk in turn)
        and other.slots[GPU] != NO_SLOT
        and store.gpu.free == 5
    )
    evictor.take_gpu_slots(6)
    assert (
        not any(chunk.resident for chunk in turn)
        and other.slots[HOST] != NO_SLOT
        and store.host.free == 1
    )
    check(store)


def test_more_than_was_counted_is_an_error():
    store = a_store(gpu=2)
    chunk = in_use(store)
    _, evictor = an_evictor(store, now=1.0)
    with pytest.raises(InvariantError, match="obtainable"):
        evictor.take_gpu_slots(2)
    check(store, held=[chunk])


def test_failed_copies_are_found_by_their_slots(monkeypatch):
    """The slot's present chunk is found without a search of all chunks: there may be a million, and
    some each step."""
    store = a_store(gpu=3, host=2, copies_may_fail=True)
    first, second = idle(store, now=1.0), idle(store, now=2.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.swap_out_ahead(available=3, most=2)
    slots = first.slots[HOST], second.slots[HOST]
    store.drop(first)
    store.release_gpu(second)
    _, evictor = an_evictor(store, now=11.0, step=2)
    third = idle(store, now=3.0)
    assert evictor.stage(third) and third.slots[HOST] == slots[0]
    monkeypatch.setattr(store, "resident_chunks", None)
    store.drop_bad_copies(slots)
    monkeypatch.undo()
    assert (third.slots[HOST], third.slots[GPU] >= 0, second.resident, store.bad_copies) == (
        NO_SLOT,
        True,
        False,
        2,
    )
    store.drop_bad_copies(slots)
    assert store.bad_copies == 2 and store.host.free == 2
    check(store)


def test_what_cannot_go_to_disk_is_not_the_first_to_leave_the_gpu():
    """A chunk that was copied to make room is taken without another copy; a chunk that was copied
    for DISK keeps its place, for example a pinned one."""
    store = a_store(gpu=2, host=2, copies_may_fail=True)
    pinned, old = idle(store, now=9.0, claims=1), idle(store, now=1.0)
    store.change_pins(pinned, 1)
    _, evictor = an_evictor(store, now=10.0)
    assert evictor.stage(pinned)
    store.drop_bad_copies([pinned.slots[HOST]])
    _, evictor = an_evictor(store, now=11.0, step=2)
    evictor.take_gpu_slots(1)
    assert (old.slots[GPU], old.resident, pinned.resident) == (NO_SLOT, True, True)
    _, evictor = an_evictor(store, now=12.0, step=3)
    evictor.swap_out_ahead(available=2, most=1)
    store.drop_bad_copies([pinned.slots[HOST]])
    assert pinned in store.spare[GPU] and store.host.free == 1


def test_a_failed_copy_is_given_up_in_its_own_slot_alone():
    """The chunk has left that slot and been copied to another one since: the later copy stays."""
    store = a_store(gpu=2, host=2, copies_may_fail=True)
    chunk = idle(store, now=1.0)
    _, evictor = an_evictor(store, now=10.0)
    evictor.swap_out_ahead(available=2, most=1)
    before = chunk.slots[HOST]
    store.release_host(chunk)
    _, evictor = an_evictor(store, now=11.0, step=2)
    evictor.swap_out_ahead(available=2, most=1)
    assert chunk.slots[HOST] not in (NO_SLOT, before)
    after = chunk.slots[HOST]
    store.drop_bad_copies([before])
    assert (chunk.slots[HOST], store.bad_copies) == (after, 0)
    check(store)


def test_nothing_gives_way_to_what_is_worth_the_same():
    """A copy would be made, and the loss would equal the gain."""
    store = a_store(gpu=2, host=1)
    kept, refused_by_host = idle(store, now=1.0, on_gpu=False), idle(store, now=1.0)
    copies, evictor = an_evictor(store, now=10.0)
    evictor.swap_out_ahead(available=2, most=1)
    assert (
        kept.resident
        and refused_by_host.refused_by_host
        and not len(copies.swap_outs_ahead.sources)
    )
    check(store)


def test_no_record_gives_way_to_what_is_worth_the_same():
    store = a_store(gpu=2, host=2, disk=1)
    kept, refused = idle(store, now=1.0, on_gpu=False), idle(store, now=1.0, on_gpu=False)
    record(store, kept)
    store.release_host(kept)
    _, evictor = an_evictor(store, now=10.0)
    spill(evictor, refused, store.lower[0])
    assert kept.slots[Tier.DISK] >= 0 and refused.moving is None
    check(store)


def test_by_default_few_slots_are_kept_free():
    """Of 400 slots 80 are free. By the model's costs 60 are enough, 40 of them the reserve. With a
    mark of 0.25 others are copied until 100 are free or reclaimable."""
    copied = []
    for mark in (None, 0.25):
        harness = Harness(
            gpu_kv_chunks=400, host_kv_chunks=400, max_model_len=1400, swap_out_below=mark
        )
        harness.turn(range(1280), 1)
        harness.turn([1], 20)
        copied.append(harness.counts["saves"])
    assert copied[0] == 0 and copied[1] > 20


@pytest.mark.parametrize("drops", [True, False])
def test_an_urgent_read_takes_the_copies_of_chunks_that_stay_longest_on_the_gpu(drops):
    """HOST has nothing but copies of idle GPU chunks that are worth less than what is read.
    Without their copies the chunks are still there; without the read its chunk is computed."""
    store = a_store(gpu=4, host=2, disk=2)
    wanted = idle(store, now=9.0, on_gpu=False)
    record(store, wanted)
    store.release_host(wanted)
    old, young = idle(store, now=1.0, copied=True), idle(store, now=2.0, copied=True)
    _, evictor = an_evictor(store, now=10.0)
    assert promote(evictor, wanted, drops) is drops
    assert (young.slots[HOST] == NO_SLOT) is drops
    assert old.slots[HOST] != NO_SLOT and {NO_SLOT} != {old.slots[GPU], young.slots[GPU]}
    check(store)


def test_an_urgent_read_looks_past_chunks_that_cannot_give_up_a_copy():
    """The most valuable idle chunk has no copy on HOST, the next one's is being written below."""
    store = a_store(gpu=4, host=2, disk=3)
    wanted = idle(store, now=9.0, on_gpu=False)
    record(store, wanted)
    store.release_host(wanted)
    usable = idle(store, now=1.0, copied=True)
    written = idle(store, now=2.0, copied=True)
    store.spill(written, store.lower[0])
    refused = idle(store, now=3.0)
    refused.refused_by_host = True
    store.update_victim_set(refused)
    _, evictor = an_evictor(store, now=10.0)
    assert promote(evictor, wanted, drops=True)
    assert usable.slots[HOST] == NO_SLOT and written.slots[HOST] != NO_SLOT
    check(store)
