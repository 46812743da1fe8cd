"""Makes room during one plan: takes GPU slots back, copies chunks out ahead of time (Pensieve, section 4.3.2), and
finds slots on HOST and DISK for what is worth more than what holds them."""

from __future__ import annotations

from functools import cached_property

from .chunks import NO_SLOT, Chunk, ChunkStore
from .copies import StepCopies
from .plan import Lane
from .retention import Head
from .types import InvariantError


class RoomMaker:
    """Victims of one plan, by retention value at its one `now`."""

    def __init__(self, store: ChunkStore, copies: StepCopies, now: float):
        self._store = store
        self._copies = copies
        self._now = now

    # Made when first used: most plans make no room.

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

    def gpu_slots(self, count: int) -> None:
        """Makes at least `count` GPU slots free; the caller has checked that so many are obtainable.

        First those that cost nothing, then only copies: moved to HOST by a copy that the step waits for, or dropped.
        """
        store, evictions = self._store, self._store.evictions
        if (missing := count - store.gpu.free) <= 0:
            return
        head, turn, whole = self._reclaimable, -1.0, store.policy.whole
        while victim := head.peek():
            if missing <= 0 and not (whole and store.policy.stamp(victim) == turn):
                return
            if whole:
                turn = store.policy.stamp(victim)
            if head.value != evictions.value:
                evictions.turn_to(head.value)
            evictions.of_value += 1
            if victim.host == NO_SLOT and victim.disk == NO_SLOT:
                evictions.gpu_dropped += 1
            else:
                evictions.gpu_reclaimed += 1
            store.release_gpu(victim)
            missing -= 1
        while store.gpu.free < count:
            if not (victim := self._uncopied.peek()):
                raise InvariantError(f"{count} GPU slots were counted as obtainable, {store.gpu.free} are")
            if (slot := self._host_slot(self._uncopied.value)) != NO_SLOT:
                self._copies.evictions.add(victim.gpu, slot)
                victim.host = slot
                evictions.gpu_moved += 1
            elif victim.disk != NO_SLOT:
                evictions.gpu_reclaimed += 1
            else:
                evictions.gpu_dropped += 1
            evictions.went_at(self._uncopied.value)
            store.release_gpu(victim)

    def save_ahead(self, available: int, most: int) -> None:
        """Copies out chunks of lowest V until `available` GPU slots cost nothing, at most `most`."""
        store, uncopied, saved = self._store, self._uncopied, 0
        # Giving up the copy of an idle chunk takes from what is available, hence the second look.
        while saved < most and (missing := available - store.available) > 0:
            for _ in range(missing):
                chunk = uncopied.peek()
                if chunk is None or saved == most:
                    return
                if (slot := self._host_slot(uncopied.value)) != NO_SLOT:
                    self._copies.saves.add(chunk.gpu, slot)
                    chunk.host = slot
                    saved += 1
                else:
                    chunk.declined = True
                store.file(chunk)

    # -- HOST

    def save(self, chunk: Chunk) -> bool:
        """Copies the chunk out on its way to DISK, if that takes nothing from HOST that is nowhere else."""
        store = self._store
        slot = self._host_slot(store.policy.value(chunk, self._now), drops=False)
        if slot != NO_SLOT:
            if chunk.users:  # its slot's last step is noted when its rows let it go; what wrote it has been applied
                computed = store.gpu.last[Lane.COMPUTE]
                computed[chunk.gpu] = max(computed[chunk.gpu], store.completed.compute)
            self._copies.saves.add(chunk.gpu, slot)
            chunk.host = slot
            store.file(chunk)
        return slot != NO_SLOT

    def promote(self, chunk: Chunk, drops: bool) -> bool | None:
        """Begins to read the chunk from DISK; False if HOST has no room for it, None if a slot will be quiet soon.

        `drops`: also where HOST must drop a chunk of lower value for it.
        """
        host = self._store.host
        if not host.free and not self._give_up_host_copies(self._store.policy.value(chunk, self._now), drops):
            return False
        if not host.next_is_quiet(self._store.completed):
            return None
        self._store.disk.promote(chunk, host.take())
        return True

    def _host_slot(self, value: float, drops: bool = True) -> int:
        """A HOST slot for a chunk of that value, or NO_SLOT if HOST holds nothing of lower value.

        Given up, in this order: copies of chunks in use on the GPU; copies of idle GPU chunks that will stay there
        longer than this one; of those worth less than this one, chunks that are on DISK, then (`drops`) others.
        """
        host = self._store.host
        if host.free or self._give_up_host_copies(value, drops):
            return host.take()
        return NO_SLOT

    def _give_up_host_copies(self, value: float, drops: bool) -> bool:
        """At least one, if it can be."""
        store, in_use = self._store, self._copies.host_slot_in_use
        # Filed in order: behind one whose slot this plan uses, all are this plan's.
        for busy in store.busy_copied:
            if in_use(busy.host):
                break
            store.release_host(busy)
            store.evictions.host_copies += 1
            return True
        idle = self._most_valuable.peek()
        movable = idle and idle.host != NO_SLOT and idle.moving is None
        if idle and movable and self._most_valuable.value > value and not in_use(idle.host):
            store.release_host(idle)
            store.evictions.host_copies += 1
            return True
        spare = self._host_spare.peek()
        if spare and self._host_spare.value < value and not in_use(spare.host):
            store.release_host(spare)
            store.evictions.host_reclaimed += 1
            return True
        victim = self._host_only.peek()
        if not drops or victim is None or self._host_only.value >= value or in_use(victim.host):
            return False
        self._drop_from_host(victim)
        if store.policy.whole:
            turn = store.policy.stamp(victim)
            while (victim := self._host_only.peek()) and store.policy.stamp(victim) == turn and not in_use(victim.host):
                self._drop_from_host(victim)
        return True

    def _drop_from_host(self, victim: Chunk) -> None:
        self._store.evictions.host_dropped += 1
        self._store.evictions.went_at(self._host_only.value)
        self._store.drop(victim)

    # -- DISK

    def spill(self, chunk: Chunk) -> bool:
        """Begins to write the chunk's HOST copy to DISK, unless all of DISK is worth more, copies of what is above
        included."""
        slot = self._disk_slot(self._store.policy.value(chunk, self._now))
        if slot != NO_SLOT:
            self._store.disk.spill(chunk, slot)
        return slot != NO_SLOT

    def spill_ahead(self, spare: int, most: int) -> None:
        """Begins to write the chunks of lowest V that are only on HOST, until `spare` HOST slots are free to take or
        will be; at most `most`. What DISK does not want (tails, and what is worth less than all it holds) is dropped.
        """
        store, disk = self._store, self._store.disk
        while most > 0 and store.host.free + len(store.host_spare) + disk.writing < spare:
            victim, value = self._host_only.peek(), self._host_only.value
            if victim is None or store.host.last[Lane.OUT][victim.host] > store.completed.swap_out:
                return
            slot = self._disk_slot(value, for_room=True) if victim.key is not None else NO_SLOT
            if slot != NO_SLOT:
                disk.spill(victim, slot)
            elif self._copies.host_slot_in_use(victim.host):
                return
            else:
                self._drop_from_host(victim)
            most -= 1

    def _disk_slot(self, value: float, for_room: bool = False) -> int:
        """A DISK slot for a chunk of that value, or NO_SLOT if DISK holds nothing of lower value.

        `for_room`: HOST wants its slot back. Then a record that is only a copy goes first, if its chunk will stay above
        for longer: the latest copy, which is about the one of highest value.
        """
        store, disk = self._store, self._store.disk
        if disk.room:
            return disk.take()
        copy = next(reversed(store.disk_copies), None) if for_room else None
        if copy is not None and store.policy.value(copy, self._now) > value:
            store.release_disk(copy)
            store.evictions.disk_copies += 1
            return disk.take()
        victim = self._disk_only.peek()
        if victim is None or self._disk_only.value >= value:
            return NO_SLOT
        self._drop_from_disk(victim)
        if store.policy.whole:
            turn = store.policy.stamp(victim)
            while (victim := self._disk_only.peek()) and store.policy.stamp(victim) == turn:
                self._drop_from_disk(victim)
        return disk.take()

    def _drop_from_disk(self, victim: Chunk) -> None:
        self._store.evictions.disk_dropped += 1
        self._store.evictions.went_at(self._disk_only.value)
        self._store.drop(victim)
