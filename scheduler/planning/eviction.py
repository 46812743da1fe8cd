"""Makes room during one plan: takes GPU slots back, copies chunks out ahead of time (Pensieve,
section 4.3.2), and frees slots on HOST and below for chunks of higher value than those there."""

from __future__ import annotations

from itertools import islice

from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.lower_tiers import LowerTier
from ..kv.victim_sets import Head, VictimSet
from ..plan import Lane
from ..types import GPU, HOST, InvariantError
from .plan_copies import LaneCopies, StepCopies


class Evictor:
    """Chooses the victims of one plan, by their values at the plan's time."""

    def __init__(self, store: ChunkStore, copies: StepCopies, now: float):
        self._store = store
        self._copies = copies
        self._now = now

        self._heads: dict[VictimSet, Head] = {}

    def _head(self, members: VictimSet) -> Head:
        """The set's next victims. Created at first use: most plans make no room."""
        head = self._heads.get(members)
        if head is None:
            head = self._heads[members] = Head(members, self._now)
        return head

    # -- GPU

    def take_gpu_slots(self, count: int) -> None:
        """Makes at least `count` GPU slots free. The caller has checked that this many are
        obtainable.

        Takes spare slots first, then those of only copies, which are moved to HOST by a copy
        that the step waits for, or dropped.
        """
        store = self._store
        if count <= store.gpu.free:
            return
        evictions = store.evictions
        spare = self._head(store.spare[GPU])
        while (missing := count - store.gpu.free) > 0:
            victims = spare.peek(store.policy.at_once(missing))
            if not victims:
                break
            evictions.count_values(spare.value, len(victims))
            dropped = store.reclaim_gpu(victims)
            evictions.count(GPU, "dropped", dropped)
            evictions.count(GPU, "reclaimed", len(victims) - dropped)
        only = self._head(store.only[GPU])
        while (missing := count - store.gpu.free) > 0:
            victims = only.peek(missing)
            if not victims:
                raise InvariantError(
                    f"{count} GPU slots were counted as obtainable, {store.gpu.free} are"
                )
            evictions.count_values(only.value, len(victims))
            moved = self._copy_out(victims, only.value, self._copies.evictions)
            dropped = store.reclaim_gpu(victims)
            evictions.count(GPU, "moved", moved)
            evictions.count(GPU, "dropped", dropped)
            # the others had a copy on HOST, staged there or found there
            evictions.count(GPU, "reclaimed", len(victims) - moved - dropped)

    def swap_out_ahead(self, available: int, most: int) -> None:
        """Copies out chunks of lowest V, at most `most`, until `available` GPU slots are free or
        spare."""
        store = self._store
        only = self._head(store.only[GPU])
        copied = 0
        # `store.available` is read anew in each pass: a chunk that loses its HOST copy to another
        # is no longer spare.
        while (missing := min(available - store.available, most - copied)) > 0:
            chunks = only.peek(missing)
            if not chunks:
                return
            copied += self._copy_out(chunks, only.value, self._copies.swap_outs_ahead)
            store.make_reclaimable(chunks)

    def _copy_out(self, chunks: list[Chunk], value: float, copies: LaneCopies) -> int:
        """Copies the first of these chunks of one value to HOST, as many as get a slot there;
        staged chunks already have one. Returns how many were copied."""
        store = self._store
        uncopied = [chunk for chunk in chunks if chunk.slots[HOST] == NO_SLOT]
        slots = self.host_slots(len(uncopied), value)
        copied = uncopied[: len(slots)]
        copies.add([chunk.slots[GPU] for chunk in copied], slots)
        for chunk, slot in zip(copied, slots, strict=True):
            store.copied_out(chunk, slot)
        return len(slots)

    # -- HOST

    def stage(self, chunk: Chunk, drops: bool = False) -> bool:
        """Copies the chunk to HOST on its way to a lower tier. `drops`: a chunk of lower value that
        is only on HOST may be dropped for it."""
        store = self._store
        slots = self.host_slots(1, store.policy.value(chunk, self._now), drops)
        if slots:
            # its rows note the slot's last step when they release it; the step that wrote the slot
            # has been applied
            if chunk.users:
                computed = store.gpu.last[Lane.COMPUTE]
                computed[chunk.slots[GPU]] = max(
                    computed[chunk.slots[GPU]], store.completed.compute
                )
            self._copies.swap_outs_ahead.add([chunk.slots[GPU]], slots)
            store.stage(chunk, slots[0])
        return bool(slots)

    def promote(self, chunk: Chunk, drops: bool) -> bool | None:
        """Begins to read the chunk from a lower tier. Returns False if HOST has no room
        for it, None if a slot will be unused soon.

        `drops`: HOST may drop a chunk of lower value for it, or the copy of any idle GPU chunk.
        """
        host = self._store.host
        value = self._store.policy.value(chunk, self._now)
        has_room = (
            host.free
            or self._give_up_host_slots(1, value, drops)
            or (drops and self._give_up_copies(1))
        )
        # the chunk may have gone with another piece of its state, to make the room
        if not has_room or not chunk.resident:
            return False
        if not host.next_is_quiet(self._store.completed):
            return None
        self._store.promote(chunk, host.take())
        return True

    def host_slots(self, count: int, value: float, drops: bool = True) -> list[int]:
        """Returns HOST slots for `count` chunks of that value; fewer if HOST holds too little of
        lower value.

        Evicts, in this order:
        * copies of chunks in use on the GPU
        * copies of idle GPU chunks of higher value than `value`: they will stay on the GPU
        * chunks of lower value that are also in a lower tier
        * with `drops`, other chunks of lower value
        """
        host = self._store.host
        while (missing := count - host.free) > 0 and self._give_up_host_slots(
            missing, value, drops
        ):
            pass
        return [host.take() for _ in range(min(count, host.free))]

    def _give_up_host_slots(self, missing: int, value: float, drops: bool) -> bool:
        """Frees at least one HOST slot if possible; more than `missing` only when a whole turn is
        evicted. Returns False if none."""
        store = self._store
        unused = self._copies.without_host_slot_in_use
        # The set is in the order of filing: after the first chunk whose slot this plan uses, all
        # are this plan's.
        busy = unused(islice(store.busy_copied, missing))
        if self._give_up(busy, "copy") or self._give_up_copies(missing, value):
            return True
        head = self._head(store.spare[HOST])
        spare = unused(head.peek(missing))
        if spare and head.value < value:
            return self._give_up(spare, "reclaimed")
        if not drops:
            return False
        head = self._head(store.only[HOST])
        victims = unused(head.peek(store.policy.at_once(missing)))
        if not victims or head.value >= value:
            return False
        self._drop_from_host(victims, head.value)
        return True

    def _give_up_copies(self, most: int, value: float = 0.0) -> bool:
        """Frees the HOST slots of idle GPU chunks of higher value than `value`, those of highest
        value first: they stay on the GPU longest."""
        head = Head(self._store.spare[GPU], self._now, descending=True)
        idle = [
            chunk
            for chunk in head.peek(most)
            if chunk.slots[HOST] != NO_SLOT and chunk.moving is None
        ]
        unused = self._copies.without_host_slot_in_use(idle)
        return head.value > value and self._give_up(unused, "copy")

    def _give_up(self, chunks: list[Chunk], event: str) -> bool:
        """Frees the HOST slots of these chunks. Returns False if there are none."""
        for chunk in chunks:
            self._store.release_host(chunk)
        self._store.evictions.count(HOST, event, len(chunks))
        return bool(chunks)

    def _drop_from_host(self, victims: list[Chunk], value: float) -> None:
        """Drops chunks of that value that are only on HOST."""
        self._store.drop_from_host(victims)
        self._store.evictions.count(HOST, "dropped", len(victims))
        self._store.evictions.count_values(value, len(victims))

    # -- lower tiers

    def spill(self, chunk: Chunk, lower: LowerTier) -> None:
        """Begins to write the chunk's HOST copy to the tier, unless that holds only chunks of
        higher value."""
        value = self._store.policy.value(chunk, self._now)
        # a piece may have gone with another one of its state, to make the room
        if self._makes_room(lower, value) and chunk.slots[HOST] != NO_SLOT:
            self._store.spill(chunk, lower)

    def spill_ahead(self, lower: LowerTier, spare: int, most: int) -> bool:
        """Begins to write the chunks of lowest V that are only on HOST to the tier, until `spare`
        HOST slots are free to take or will be; at most `most`. Drops tails, and chunks of lower
        value than all in the tier.

        The slot of a chunk that is also in a lower tier counts as free to take, unless the chunk is
        worth more than the victims (for example, it was read for the queue): chunks of turns that
        have just ended could not take that slot. Returns False if the next victim's copy on HOST is
        not known to be complete, so the caller must try again.
        """
        store = self._store
        host_only = self._head(store.only[HOST])
        host_spare = self._head(store.spare[HOST])
        while most > 0 and store.host.free + lower.writing < spare:
            victims = host_only.peek(1)
            takeable = host_spare.peek(1) and host_spare.value <= host_only.value
            if not victims or (
                takeable and store.host.free + len(store.spare[HOST]) + lower.writing >= spare
            ):
                return True
            victim = victims[0]
            if store.host.last[Lane.OUT][victim.slots[HOST]] > store.completed.swap_out:
                return False
            room = victim.key is not None and self._makes_room(
                lower, host_only.value, for_host=True
            )
            if victim.slots[HOST] == NO_SLOT:
                pass  # it has gone with another piece of its state, to make the room
            elif room:
                store.spill(victim, lower)
            else:
                self._drop_from_host(victims, host_only.value)
            most -= 1
        return True

    def _makes_room(self, lower: LowerTier, value: float, for_host: bool = False) -> bool:
        """Makes room in the tier for a chunk of that value. Returns False if the tier holds nothing
        of lower value, or must erase a slot before it is used again.

        `for_host`: the caller frees a HOST slot. Then a record whose chunk is also on the GPU goes
        first, if that chunk will stay there longer: the latest one, which has about the highest
        value.
        """
        if lower.room:
            return True
        store = self._store
        tier = lower.tier
        copy = next(reversed(store.copies[tier]), None) if for_host else None
        if copy is not None and store.policy.value(copy, self._now) > value:
            store.release_record(copy, lower)
            store.evictions.count(tier, "copy", 1)
            return lower.room > 0
        head = self._head(store.only[tier])
        victims = head.peek(store.policy.at_once(1))
        if not victims or head.value >= value:
            return False
        store.evictions.count(tier, "dropped", len(victims))
        store.evictions.count_values(head.value, len(victims))
        for victim in victims:
            if victim.resident:  # else it has gone with another piece of its state
                store.drop(victim)
        return lower.room > 0
