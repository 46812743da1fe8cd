from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pensieve.scheduler
from pensieve.scheduler.kv.chunk import NO_SLOT, Chunk
from pensieve.scheduler.plan import Lane, Tickets
from pensieve.scheduler.types import GPU, HOST, InvariantError

from ..stores import SIZE, a_store, check, fresh_key, idle, in_use


def test_the_first_owner_of_a_key_keeps_it():
    """Computed twice side by side: the later one stays private, and is gone when its row leaves."""
    store = a_store()
    key = fresh_key()
    first, second = store.new(SIZE, 0.0), store.new(SIZE, 0.0)
    assert store.publish(first, key) is first
    assert store.publish(second, key) is second and second.key is None
    check(store, held=[first, second])
    second.tokens = 0  # as let go by its row
    store.unpin([second], 1, 1.0)
    assert store.gpu.free == 7 and store.find(key) is first
    check(store, held=[first])


def test_a_dropped_owner_takes_over_the_slot_of_the_recomputed_chunk():
    """A conversation claims the dropped chunk; the recomputed KV becomes that chunk's, claim and
    all."""
    store = a_store()
    key = fresh_key()
    owner = idle(store, now=1.0, key=key, claims=1)
    store.release_gpu(owner)
    assert not owner.resident and store.find(key) is owner and store.dropped == 1
    again = store.new(SIZE, 5.0)
    slot = again.slots[GPU]
    assert store.publish(again, key) is owner
    assert (owner.slots[GPU], owner.users, owner.last_active) == (slot, 1, 5.0) and again.slots[
        GPU
    ] == NO_SLOT
    check(store, held=[owner], claims={owner: 1})


def test_an_owner_on_host_takes_over_the_gpu_slot_and_keeps_its_copy():
    """If recomputing is faster than loading, the chunk ends up in both tiers."""
    store = a_store()
    key = fresh_key()
    owner = idle(store, key=key, on_gpu=False)
    assert store.publish(store.new(SIZE, 1.0), key) is owner
    assert (
        owner.slots[GPU] != NO_SLOT and owner.slots[HOST] != NO_SLOT and owner in store.busy_copied
    )
    check(store, held=[owner])


def test_keys_of_dropped_chunks_stay_known_for_a_bounded_while():
    store = a_store(gpu=2, host=1)
    keys = [fresh_key() for _ in range(20)]
    for key in keys:
        store.drop(idle(store, key=key))
        assert store.was_computed(key) and store.find(key) is None
    assert [store.was_computed(key) for key in keys] == [False] * 8 + [True] * 12
    again = idle(store, key=keys[-1])
    assert store.find(keys[-1]) is again
    assert sum(key in store._forgotten for key in keys) == 11


def test_a_claimed_chunk_stays_in_the_store_when_it_is_dropped():
    store = a_store()
    chunk = idle(store, claims=1)
    store.drop(chunk)
    check(store, claims={chunk: 1})
    store.unclaim(chunk)
    assert store.find(chunk.key) is None and store.was_computed(chunk.key)
    check(store)


def test_an_idle_chunk_is_filed_where_its_copies_say():
    store = a_store()
    only, both, host = idle(store), idle(store, copied=True), idle(store, on_gpu=False)
    assert (list(store.only[GPU]), list(store.spare[GPU]), list(store.only[HOST])) == (
        [only],
        [both],
        [host],
    )
    assert (store.available, store.obtainable) == (6 + 1, 6 + 2)
    store.pin([both])
    assert both in store.busy_copied and not len(store.spare[GPU])
    check(store, held=[both])


def test_without_host_slots_every_idle_chunk_is_reclaimable():
    store = a_store(host=0)
    assert idle(store) in store.spare[GPU]


def test_a_declined_chunk_is_reclaimable_until_its_conversation_is_active_again():
    store = a_store()
    chunk = idle(store)
    chunk.refused_by_host = True
    store.update_victim_set(chunk)
    assert chunk in store.spare[GPU]
    store.touch(chunk, 5.0)
    assert chunk in store.only[GPU] and chunk.last_active == 5.0
    check(store)


def test_a_row_that_lets_go_notes_its_last_step_on_the_slot():
    """The slot's next user waits for that step on the device."""
    store = a_store()
    chunk = in_use(store)
    store.pin([chunk])
    store.unpin([chunk], 9, 1.0)
    store.unpin([chunk], 4, 2.0)
    assert store.gpu.last[Lane.COMPUTE][chunk.slots[GPU]] == 9 and chunk.last_active == 2.0


def test_a_host_slot_that_a_swap_in_still_reads_is_free_after_the_plan():
    store = a_store(host=1)
    tail = store.new(SIZE, 0.0)
    tail.tokens = 2
    tail.slots[HOST] = store.host.take()
    store.release_host_late(tail)
    assert tail.slots[HOST] == NO_SLOT and store.host.free == 0
    store.end_plan()
    assert store.host.free == 1
    check(store, held=[tail])


def test_letting_go_twice_is_an_error():
    store = a_store()
    chunk = idle(store)
    with pytest.raises(InvariantError, match="does not hold it"):
        store.unpin([chunk], 0, 0.0)
    with pytest.raises(InvariantError, match="does not claim it"):
        store.unclaim(chunk)


def lost_slot(store, chunk):
    chunk.slots[GPU] = NO_SLOT


def double_slot(store, chunk):
    idle(store).slots[GPU] = chunk.slots[GPU]


def foreign_key(store, chunk):
    chunk.key = fresh_key()


def unfiled(store, chunk):
    store.only[GPU].discard(chunk)


def misfiled(store, chunk):
    store.only[GPU].discard(chunk)
    store.only[HOST].add(chunk)


def filed_ghost(store, chunk):
    store.spare[GPU].add(Chunk(SIZE, 0, 0.0))


def unfreed(store, chunk):
    store.gpu.take()


def kept_for_no_conversation(store, chunk):
    store._private[Chunk(SIZE, NO_SLOT, 0.0)] = None


@pytest.mark.parametrize(
    "damage",
    [
        lost_slot,
        double_slot,
        foreign_key,
        unfiled,
        misfiled,
        filed_ghost,
        unfreed,
        kept_for_no_conversation,
    ],
)
def test_check_notices(damage):
    store = a_store()
    chunk = idle(store)
    check(store)
    damage(store, chunk)
    with pytest.raises(InvariantError):
        check(store)


def test_check_counts_users_and_claims_afresh():
    store = a_store()
    chunk = in_use(store)
    with pytest.raises(InvariantError, match="0 rows"):
        check(store)
    with pytest.raises(InvariantError, match="not in the store"):
        check(store, held=[chunk, Chunk(SIZE, 0, 0.0)])
    with pytest.raises(InvariantError, match="claims=2"):
        check(store, held=[chunk], claims={chunk: 2})


def test_a_copy_counts_from_its_own_ticket_on():
    """With the ticket before it the copy is not confirmed yet: it may fail."""
    store = a_store(copies_may_fail=True)
    chunk = idle(store, on_gpu=False)
    store.host.last[Lane.OUT][chunk.slots[HOST]] = 6
    for completed, unconfirmed in ((5, True), (6, False)):
        store.completed = Tickets(swap_out=completed)
        assert store.unconfirmed(chunk) is unconfirmed


def test_a_chunk_that_several_requests_wait_for_has_the_place_of_the_first_of_them():
    store = a_store()
    chunk = idle(store)
    early, late, urgent = (0, 3), (0, 5), (-1, 6)
    for place, places in (
        *((early, [early]), (late, [early, late]), (None, [early, late])),
        *((late, [early, late]), (urgent, [urgent, early, late])),
    ):
        store.touch(chunk, 1.0, place)
        assert chunk.queue_places == places
    for place, places in ((urgent, [early, late]), (late, [early]), (early, [])):
        store.end_wait([chunk], place)
        assert chunk.queue_places == places


OWNED = {
    "slots",
    "users",
    "claims",
    "pins",
    "over_quota",
    "past_window",
    "queue_places",
    "loading",
    "moving",
}
OWNED |= {"staged", "refused_by_host", "dropped_at"}


def test_only_the_store_writes_slots_and_flags_of_chunks():
    folder = Path(pensieve.scheduler.__file__).parent
    for path in folder.rglob("*.py"):
        if path.name in ("chunk.py", "chunk_store.py", "moves.py"):  # the store's own files
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            target = node.value if isinstance(node, ast.Subscript) else node
            if (
                isinstance(target, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and target.attr in (OWNED if target is node else {"slots"})
            ):
                owner = ast.unparse(target.value)
                assert owner in ("self", "conversation"), (
                    f"{path.name}:{node.lineno} writes {ast.unparse(node)}"
                )
