"""Hazards (docs/design/hazards.md) of slots, copies and tails, each a short story of a possible
failure.

The device model below checks every read, write, wait and token; the tests check further conditions.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.chunk_keys import chunk_key, root_key
from pensieve.scheduler.kv.slots import SlotPool
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.planning.plan_copies import StepCopies
from pensieve.scheduler.types import GPU, HOST

from .harness import Harness
from .stories import FLUSH, TIGHT, off_gpu

# -- a slot given away while a copy or a launched step still reads or writes it


class Uses:
    """One piece of work on a slot of each pool, by lane."""

    def __init__(self):
        self.gpu, self.host = SlotPool(1), SlotPool(1)
        self.step = 0

    def use(self, lane):
        """The lane's work of the next plan on GPU slot 0 (and HOST slot 0). Returns (its ticket,
        the tickets that it waits for)."""
        self.step += 1
        copies = StepCopies(self.step, self.gpu, self.host)
        if lane == Lane.COMPUTE:
            copies.step_writes(0)
            self.gpu.last[Lane.COMPUTE][0] = self.step
            return self.step, copies.after
        (copies.early if lane == Lane.IN else copies.evictions).add([0], [0])
        (batch,) = copies.batches()
        return batch.ticket, batch.after


@pytest.mark.parametrize(("first", "second"), list(permutations(Lane, 2)))
def test_a_slot_changes_hands_only_behind_its_last_use(first, second):
    """After any last use of the slot, work on another lane that gets the slot waits for exactly
    that use."""
    uses = Uses()
    ticket, _ = uses.use(first)
    _, after = uses.use(second)
    assert after[first] == ticket
    assert sum(after) == ticket


def test_a_swap_out_waits_for_the_step_that_wrote_the_kv():
    """The reply ended, but its last step may still run when the plan that evicts its chunks is
    issued."""
    harness = Harness(**TIGHT)
    harness.turn(range(18), 2, "a")
    last = harness.device.step
    harness.submit(FLUSH, 4)
    evictions = harness.tick().copies[0]
    assert evictions.lane == Lane.OUT and evictions.after.compute == last


def test_slots_of_an_aborted_row_wait_for_its_launched_step():
    """The client leaves while two steps of its row are in flight; a swap-in gets the slots they
    write."""
    harness = Harness(**TIGHT)
    prompt = off_gpu(harness)
    leaver = harness.submit(range(200, 252), 8)
    harness.run_until(lambda: harness.reply(leaver))
    harness.launch()
    last = harness.launch()
    assert last.generate
    harness.abort(leaver)
    harness.submit(prompt, 4, "a")
    swap_in = next(batch for batch in harness.launch().copies if batch.lane == Lane.IN)
    assert swap_in.after.compute == last.step
    harness.drain()


def test_a_step_waits_for_the_eviction_that_empties_its_slots():
    harness = Harness(**TIGHT)
    harness.turn(range(18), 2, "a")
    harness.submit(FLUSH, 4)
    plan = harness.tick()
    assert plan.copies[0].lane == Lane.OUT and plan.after.swap_out == plan.copies[0].ticket


def test_a_swap_in_waits_for_the_swap_out_of_the_same_chunk():
    """The chunk comes back while its way out is still in flight."""
    harness = Harness(**TIGHT)
    harness.turn(range(18), 2, "a")
    harness.submit(FLUSH, 4)
    out = harness.launch().copies[0]
    harness.run()
    harness.submit([*harness.logs["a"], 7], 4, "a")
    swap_in = next(batch for batch in harness.launch().copies if batch.gated)
    assert swap_in.after.swap_out >= out.ticket
    harness.drain()


def test_one_plan_never_uses_a_host_slot_twice():
    """Copies of one batch run in any order, so a HOST slot that a plan reads is not a target in
    that plan.

    HOST is as small as the history that is being loaded, and a large request needs room: its
    victims must wait, even for the slot of the tail, whose copy ends with this very swap-in.
    """
    harness = Harness(**TIGHT | {"host_kv_chunks": 5})
    prompt = off_gpu(harness)
    harness.submit(prompt, 4, "a")
    harness.submit(range(200, 240), 4)
    plan = harness.tick()
    (swap_in,) = (batch for batch in plan.copies if batch.lane == Lane.IN)
    taken = {slot for batch in plan.copies if batch.lane == Lane.OUT for slot in batch.targets}
    assert not taken & set(swap_in.sources)
    harness.drain()


# -- tails


def test_a_swapped_in_tail_does_not_land_over_freshly_written_tokens():
    """The tail's copy is issued, then its row appends to it: the step that appends waits, by gate
    or by ticket."""
    harness = Harness(**TIGHT)
    harness.submit(off_gpu(harness), 4, "a")
    plan = harness.tick()
    (swap_in,) = (batch for batch in plan.copies if batch.lane == Lane.IN)
    tail_slot = plan.blocks[0].slots[4]
    assert swap_in.gated and tail_slot in swap_in.targets
    assert plan.spans[0].start == 19 and plan.spans[0].write_from == 19
    tail = harness.scheduler._queues.rows[0].chunks[4]
    assert tail.slots[GPU] == tail_slot and tail.slots[HOST] == NO_SLOT, (
        "the copy on HOST ends, for it will lack the new tokens"
    )
    harness.drain()


def test_a_gated_tail_does_not_hold_up_the_whole_step():
    """Nearly every returning conversation brings a tail. Its gates order it layer by layer; a wait
    for the whole swap-in would take the overlap away from all of it."""
    harness = Harness(**TIGHT)
    harness.submit(off_gpu(harness), 4, "a")
    plan = harness.tick()
    (swap_in,) = (batch for batch in plan.copies if batch.lane == Lane.IN)
    assert swap_in.gated and plan.after.swap_in < swap_in.ticket
    harness.drain()


def test_the_tail_is_loaded_last_and_so_is_gated():
    """A later chunk of the same prefix can outlive the keyed twin of the tail. The tail comes last
    all the same: a tail loaded early could be evicted by the very plan that loads it, and would
    wait for itself."""
    harness = Harness(**TIGHT)
    harness.turn(range(20), 1)
    harness.turn(range(10), 1, "a")
    store = harness.scheduler._store
    size = 4
    key = root_key(b"", size, b"")
    for start in (0, 4, 8):
        key = chunk_key(key, Harness.tokens(range(20)), start, start + size)
    store.drop(store.find(key))
    harness.turn(FLUSH, 4)
    log = harness.logs["a"]
    conversation = harness.scheduler.conversations.get("a")
    assert log[:10].tolist() == list(range(10)) and conversation.tail.slots[HOST] != NO_SLOT
    request = harness.submit(range(20), 4, "a")
    turn = harness.scheduler._turns[request]
    needs = harness.scheduler._lookup.look_up(turn, conversation, 0)
    assert needs.chunks.index(needs.tail) == 2 and len(needs.swap_ins) == 5
    assert needs.swap_ins[-1] is needs.tail
    harness.drain()


def test_a_host_copy_of_a_tail_ends_when_the_tail_grows():
    """Its copy lacks the new tokens; a later user of the copy would read tokens that were never
    written."""
    harness = Harness(**TIGHT | {"swap_out_below": 1.0, "host_kv_chunks": 64})
    harness.turn(range(17), 2, "a")
    tail = harness.scheduler.conversations.get("a").tail
    harness.now += 1
    while harness.launch():  # copies only
        harness.apply()
    assert tail.slots[HOST] != NO_SLOT and tail.slots[GPU] != NO_SLOT and tail.tokens == 2
    request = harness.submit([*harness.logs["a"], 9], 1, "a")
    harness.launch()
    assert tail.slots[HOST] == NO_SLOT
    harness.run(request)
    harness.turn(FLUSH, 4)
    usage = harness.turn([*harness.logs["a"], 7, 8], 4, "a")
    assert usage["host"] == len(harness.logs["a"]) - 4 - 2 - 1
    harness.drain()


# -- the circle


def test_no_work_waits_for_work_issued_later():
    """Lanes that waited for each other in a circle would stand still for ever. Every copy batch of
    a plan that has all four kinds waits at most for batches before it (the device model asserts
    that for every plan of every test)."""
    gpu, host = SlotPool(8), SlotPool(8)
    copies = StepCopies(3, gpu, host)
    for batch, source, target in (
        (copies.evictions, 0, 0),
        (copies.gated, 1, 0),  # into the slot that the eviction empties
        (copies.early, 2, 1),
        (copies.swap_outs_ahead, 3, 3),
    ):
        batch.add([source], [target])
    issued = {Lane.COMPUTE: 2, Lane.IN: 4, Lane.OUT: 4}
    for batch in copies.batches():
        assert all(ticket <= issued[lane] for lane, ticket in zip(Lane, batch.after, strict=True))
        assert batch.ticket == max(issued[batch.lane] + 1, batch.ticket)
        issued[batch.lane] = batch.ticket
    assert issued == {Lane.COMPUTE: 2, Lane.IN: 6, Lane.OUT: 6}
