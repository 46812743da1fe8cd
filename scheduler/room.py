"""Makes room during one plan: takes GPU slots back, and copies chunks out ahead of time (Pensieve, section 4.3.2)."""

from __future__ import annotations

from functools import cached_property
from itertools import islice

from .chunks import NO_SLOT, Chunk, ChunkStore
from .copies import LaneCopies, StepCopies
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
        while (missing := count - store.gpu.free) > 0:
            victims = self._reclaimable.peek(store.policy.at_once(missing))
            if not victims:
                break
            evictions.went_at(self._reclaimable.value, len(victims))
            dropped = store.reclaim_gpu(victims)
            evictions.gpu_dropped += dropped
            evictions.gpu_reclaimed += len(victims) - dropped
        while (missing := count - store.gpu.free) > 0:
            victims = self._uncopied.peek(missing)
            if not victims:
                raise InvariantError(f"{count} GPU slots were counted as obtainable, {store.gpu.free} are")
            evictions.went_at(self._uncopied.value, len(victims))
            moved = self._copy_out(victims, self._uncopied.value, self._copies.evictions)
            evictions.gpu_moved += moved
            evictions.gpu_dropped += len(victims) - moved
            store.reclaim_gpu(victims)

    def save_ahead(self, available: int, most: int) -> None:
        """Copies out chunks of lowest V until `available` GPU slots cost nothing, at most `most`."""
        store, uncopied, saved = self._store, self._uncopied, 0
        # Giving up the copy of an idle chunk takes from what is available, hence the look at it every time.
        while (missing := min(available - store.available, most - saved)) > 0:
            chunks = uncopied.peek(missing)
            if not chunks:
                return
            copied = self._copy_out(chunks, uncopied.value, self._copies.saves)
            for chunk in chunks[copied:]:
                chunk.declined = True
            store.make_reclaimable(chunks)
            saved += copied

    def _copy_out(self, chunks: list[Chunk], value: float, copies: LaneCopies) -> int:
        """Copies the first of these chunks of one value to HOST, as many as get a slot there. Returns how many."""
        slots = self._host_slots(len(chunks), value)
        copied = chunks[: len(slots)]
        copies.add([chunk.gpu for chunk in copied], slots)
        for chunk, slot in zip(copied, slots, strict=True):
            chunk.host = slot
        return len(slots)

    def _host_slots(self, count: int, value: float) -> list[int]:
        """HOST slots for `count` chunks of that value; fewer if HOST holds too little of lower value.

        Given up, in this order: copies of chunks in use on the GPU; copies of idle GPU chunks that will stay there
        longer than these; chunks worth less than these.
        """
        host = self._store.host
        while (missing := count - host.free) > 0 and self._give_up_host_slots(missing, value):
            pass
        return [host.take() for _ in range(min(count, host.free))]

    def _give_up_host_slots(self, missing: int, value: float) -> bool:
        """At least one, if it can be; more than `missing` only of a whole turn."""
        store, evictions, unused = self._store, self._store.evictions, self._copies.without_host_slot_in_use
        # Filed in order: behind one whose slot this plan uses, all are this plan's.
        if busy := unused(islice(store.busy_copied, missing)):
            for chunk in busy:
                store.release_host(chunk)
            evictions.host_copies += len(busy)
            return True
        idle = [chunk for chunk in self._most_valuable.peek(missing) if chunk.host != NO_SLOT]
        if self._most_valuable.value > value and (idle := unused(idle)):
            for chunk in idle:
                store.release_host(chunk)
            evictions.host_copies += len(idle)
            return True
        victims = unused(self._host_only.peek(store.policy.at_once(missing)))
        if not victims or self._host_only.value >= value:
            return False
        store.drop_from_host(victims)
        evictions.host_dropped += len(victims)
        evictions.went_at(self._host_only.value, len(victims))
        return True
