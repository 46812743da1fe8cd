"""Makes room during one plan: takes GPU slots back, copies chunks out ahead of time (Pensieve,
section 4.3.2), and frees slots on HOST and DISK for chunks of higher value than those there."""

from __future__ import annotations

from functools import cached_property
from itertools import islice

from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.victim_sets import Head
from ..plan import Lane
from ..types import InvariantError
from .plan_copies import LaneCopies, StepCopies


class Evictor:
    """Chooses the victims of one plan, by their values at the plan's time."""

    def __init__(self, store: ChunkStore, copies: StepCopies, now: float):
        self._store = store
        self._copies = copies
        self._now = now

    # Created at first use: most plans make no room.

    @cached_property
    def _reclaimable(self) -> Head:
        return Head(self._store.reclaimable, self._now)

    @cached_property
    def _uncopied(self) -> Head:
        return Head(self._store.uncopied, self._now)

    @cached_property
    def _host_only(self) -> Head:
        return Head(self._store.host_only, self._now)

    @cached_property
    def _host_spare(self) -> Head:
        return Head(self._store.host_spare, self._now)

    @cached_property
    def _disk_only(self) -> Head:
        return Head(self._store.disk_only, self._now)

    @cached_property
    def _most_valuable(self) -> Head:
        return Head(self._store.reclaimable, self._now, descending=True)

    # -- GPU

    def take_gpu_slots(self, count: int) -> None:
        """Makes at least `count` GPU slots free. The caller has checked that this many are
        obtainable.

        Takes reclaimable slots first, then those of only copies, which are moved to HOST by a copy
        that the step waits for, or dropped.
        """
        store = self._store
        evictions = self._store.evictions
        while (missing := count - store.gpu.free) > 0:
            victims = self._reclaimable.peek(store.policy.at_once(missing))
            if not victims:
                break
            evictions.count_evicted(self._reclaimable.value, len(victims))
            dropped = store.reclaim_gpu(victims)
            evictions.gpu_dropped += dropped
            evictions.gpu_reclaimed += len(victims) - dropped
        while (missing := count - store.gpu.free) > 0:
            victims = self._uncopied.peek(missing)
            if not victims:
                raise InvariantError(
                    f"{count} GPU slots were counted as obtainable, {store.gpu.free} are"
                )
            evictions.count_evicted(self._uncopied.value, len(victims))
            moved = self._copy_out(victims, self._uncopied.value, self._copies.evictions)
            dropped = store.reclaim_gpu(victims)
            evictions.gpu_moved += moved
            evictions.gpu_dropped += dropped
            # the others had a copy on HOST, made for DISK or found there
            evictions.gpu_reclaimed += len(victims) - moved - dropped

    def swap_out_ahead(self, available: int, most: int) -> None:
        """Copies out chunks of lowest V, at most `most`, until `available` GPU slots are free or
        reclaimable."""
        store = self._store
        uncopied = self._uncopied
        copied = 0
        # `store.available` is read anew in each pass: a chunk that loses its HOST copy to another
        # is no longer reclaimable.
        while (missing := min(available - store.available, most - copied)) > 0:
            chunks = uncopied.peek(missing)
            if not chunks:
                return
            copied += self._copy_out(chunks, uncopied.value, self._copies.swap_outs_ahead)
            store.make_reclaimable(chunks)

    def _copy_out(self, chunks: list[Chunk], value: float, copies: LaneCopies) -> int:
        """Copies the first of these chunks of one value to HOST, as many as get a slot there;
        chunks copied for DISK already have one. Returns how many were copied."""
        store = self._store
        uncopied = [chunk for chunk in chunks if chunk.host == NO_SLOT]
        slots = self._host_slots(len(uncopied), value)
        copied = uncopied[: len(slots)]
        copies.add([chunk.gpu for chunk in copied], slots)
        for chunk, slot in zip(copied, slots, strict=True):
            store.copied_out(chunk, slot)
        return len(slots)

    # -- HOST

    def stage(self, chunk: Chunk) -> bool:
        """Copies the chunk to HOST on its way to DISK, if no chunk that is only on HOST must be
        dropped for it."""
        store = self._store
        slots = self._host_slots(1, store.policy.value(chunk, self._now), drops=False)
        if slots:
            # its rows note the slot's last step when they release it; the step that wrote the slot
            # has been applied
            if chunk.users:
                computed = store.gpu.last[Lane.COMPUTE]
                computed[chunk.gpu] = max(computed[chunk.gpu], store.completed.compute)
            self._copies.swap_outs_ahead.add([chunk.gpu], slots)
            store.copied_for_disk(chunk, slots[0])
        return bool(slots)

    def promote(self, chunk: Chunk, drops: bool) -> bool | None:
        """Begins to read the chunk from DISK. Returns False if HOST has no room for it, None if a
        slot will be unused soon.

        `drops`: HOST may drop a chunk of lower value for it.
        """
        host = self._store.host
        if not host.free and not self._give_up_host_slots(
            1, self._store.policy.value(chunk, self._now), drops
        ):
            return False
        if not host.next_is_quiet(self._store.completed):
            return None
        self._store.promote(chunk, host.take())
        return True

    def _host_slots(self, count: int, value: float, drops: bool = True) -> list[int]:
        """Returns HOST slots for `count` chunks of that value; fewer if HOST holds too little of
        lower value.

        Evicts, in this order:
        * copies of chunks in use on the GPU
        * copies of idle GPU chunks of higher value than `value`: they will stay on the GPU
        * chunks of lower value that are also on DISK
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
        evictions = self._store.evictions
        unused = self._copies.without_host_slot_in_use
        # The set is in the order of filing: after the first chunk whose slot this plan uses, all
        # are this plan's.
        if busy := unused(islice(store.busy_copied, missing)):
            for chunk in busy:
                store.release_host(chunk)
            evictions.host_copies += len(busy)
            return True
        idle = [
            chunk
            for chunk in self._most_valuable.peek(missing)
            if chunk.host != NO_SLOT and chunk.moving is None
        ]
        if self._most_valuable.value > value and (idle := unused(idle)):
            for chunk in idle:
                store.release_host(chunk)
            evictions.host_copies += len(idle)
            return True
        spare = unused(self._host_spare.peek(missing))
        if spare and self._host_spare.value < value:
            for chunk in spare:
                store.release_host(chunk)
            evictions.host_reclaimed += len(spare)
            return True
        if not drops:
            return False
        victims = unused(self._host_only.peek(store.policy.at_once(missing)))
        if not victims or self._host_only.value >= value:
            return False
        self._drop_from_host(victims)
        return True

    def _drop_from_host(self, victims: list[Chunk]) -> None:
        """Drops victims that `_host_only` has just returned."""
        store = self._store
        store.drop_from_host(victims)
        store.evictions.host_dropped += len(victims)
        store.evictions.count_evicted(self._host_only.value, len(victims))

    # -- DISK

    def spill(self, chunk: Chunk) -> None:
        """Begins to write the chunk's HOST copy to DISK, unless DISK holds only chunks of higher
        value."""
        slot = self._disk_slot(self._store.policy.value(chunk, self._now))
        if slot != NO_SLOT:
            self._store.spill(chunk, slot)

    def spill_ahead(self, spare: int, most: int) -> bool:
        """Begins to write the chunks of lowest V that are only on HOST, until `spare` HOST slots
        are free to take or will be; at most `most`. Drops tails, and chunks of lower value than all
        on DISK.

        The slot of a chunk that is also on DISK counts as free to take, unless the chunk is worth
        more than the victims (for example, it was read for the queue): chunks of turns that have
        just ended could not take that slot. Returns False if the next victim's copy on HOST is not
        known to be complete, so the caller must try again.
        """
        store = self._store
        disk = self._store.disk
        while most > 0 and store.host.free + disk.writing < spare:
            victims = self._host_only.peek(1)
            takeable = self._host_spare.peek(1) and self._host_spare.value <= self._host_only.value
            if not victims or (
                takeable and store.host.free + len(store.host_spare) + disk.writing >= spare
            ):
                return True
            victim = victims[0]
            if store.host.last[Lane.OUT][victim.host] > store.completed.swap_out:
                return False
            slot = (
                self._disk_slot(self._host_only.value, for_room=True)
                if victim.key is not None
                else NO_SLOT
            )
            if slot != NO_SLOT:
                store.spill(victim, slot)
            else:
                self._drop_from_host(victims)
            most -= 1
        return True

    def _disk_slot(self, value: float, for_room: bool = False) -> int:
        """Returns a DISK slot for a chunk of that value, or NO_SLOT if DISK holds nothing of lower
        value.

        `for_room`: the caller frees a HOST slot. Then a record whose chunk is also on the GPU goes
        first, if that chunk will stay there longer: the latest one, which has about the highest
        value.
        """
        store = self._store
        disk = self._store.disk
        if disk.room:
            return disk.take()
        copy = next(reversed(store.disk_copies), None) if for_room else None
        if copy is not None and store.policy.value(copy, self._now) > value:
            store.release_disk(copy)
            store.evictions.disk_copies += 1
            return disk.take()
        victims = self._disk_only.peek(store.policy.at_once(1))
        if not victims or self._disk_only.value >= value:
            return NO_SLOT
        store.evictions.disk_dropped += len(victims)
        store.evictions.count_evicted(self._disk_only.value, len(victims))
        for victim in victims:
            store.drop(victim)
        return disk.take()
