"""Makes room during one plan: takes GPU slots back, and copies chunks out ahead of time (Pensieve, section 4.3.2)."""

from __future__ import annotations

from functools import cached_property

from .chunks import NO_SLOT, Chunk, ChunkStore
from .copies import StepCopies
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
            if victim.host == NO_SLOT:
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

    def _host_slot(self, value: float) -> int:
        """A HOST slot for a chunk of that value, or NO_SLOT if HOST holds nothing of lower value.

        Given up, in this order: copies of chunks in use on the GPU; copies of idle GPU chunks that will stay there
        longer than this one; chunks worth less than this one.
        """
        host = self._store.host
        if host.free or self._give_up_host_copies(value):
            return host.take()
        return NO_SLOT

    def _give_up_host_copies(self, value: float) -> bool:
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
        if idle and self._most_valuable.value > value and idle.host != NO_SLOT and not in_use(idle.host):
            store.release_host(idle)
            store.evictions.host_copies += 1
            return True
        victim = self._host_only.peek()
        if victim is None or self._host_only.value >= value or in_use(victim.host):
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
