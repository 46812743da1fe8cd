"""The chunk store: flat and content-addressed (docs/design/chunk-store.md).

The key of a full chunk hashes its whole prefix, so chunks looked up one by one are found even when
leading ones are gone, and contexts with the same prefix share them. A keyed chunk is never written
again. A chunk without a key is private: it is being computed, it is an unfilled tail, or it was
computed twice side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..config import SchedulerConfig
from ..plan import NO_TICKETS, Lane, StepResult
from ..types import ChunkKey, DiskRecord, InvariantError, QueuePlace
from .chunk import NEVER, NO_SLOT, Chunk, ChunkSet, Move, OrderedSet
from .disk_tier import DiskTier
from .retention import EvictionPolicy
from .slots import SlotPool
from .stats import REGRET_S, EvictionStats
from .victim_sets import VictimSet


class ChunkStore:
    """Every chunk that is resident or claimed, its slots, and the sets of victims.

    reclaimable     idle on the GPU, and the slot is free to take: a HOST copy exists, or cannot be
                    made
    uncopied        idle on the GPU without a copy on HOST, or with one that is only on its way to
                    DISK
    host_only       idle and only on HOST
    host_spare      idle on HOST, not on the GPU, with a record on DISK: its HOST slot is free to
                    take
    disk_only       idle and only on DISK
    busy_copied     in use on the GPU, with a copy on HOST: its loss costs only another copy; the
                    oldest first
    disk_copies     on DISK and on the GPU, the latest last; such a chunk is also in its set of
                    victims
    pending         keys that a row is computing, with the row's epoch
    completed       copies known to be complete on the device, and the last applied step
    now             time of the latest plan, seconds; drops are stamped with it
    bad_copies      failed copies on HOST, since the start
    dropped         chunks dropped since the start
    regret_tokens   tokens of dropped chunks that were recomputed within REGRET_S
    """

    def __init__(self, config: SchedulerConfig, policy: EvictionPolicy):
        self.policy = policy
        self.gpu = SlotPool(config.gpu_kv_chunks)
        self.host = SlotPool(config.host_kv_chunks)
        self.reclaimable = VictimSet(policy)
        self.uncopied = VictimSet(policy)
        self.host_only = VictimSet(policy)
        self.host_spare = VictimSet(policy)
        self.disk_only = VictimSet(policy)
        self.busy_copied = OrderedSet()
        self.disk_copies = OrderedSet()
        self.disk = DiskTier(config.disk_kv_chunks)
        self.pending: dict[ChunkKey, int] = {}
        self.completed = NO_TICKETS
        self.evictions = EvictionStats()
        self.now = 0.0
        self.bad_copies = self.dropped = self.regret_tokens = 0
        self._copies_may_fail = config.copies_may_fail
        # by HOST slot, if copies may fail: the last chunk copied there
        self._copied_out: dict[int, Chunk] = {}
        self._chunk_tokens = config.chunk_tokens
        self._by_key: dict[ChunkKey, Chunk] = {}
        self.find: Callable[[ChunkKey], Chunk | None] = self._by_key.get
        """Returns the chunk of the key if it is resident or claimed (a claimed chunk may be
        dropped), else None."""
        self._private: dict[Chunk, None] = {}
        self._forgotten: dict[ChunkKey, float] = {}  # dropped chunks, and when they were dropped
        self._in_order: deque[tuple[ChunkKey, float]] = deque()  # the same, the earliest first
        self._most_forgotten = (
            4 * (config.gpu_kv_chunks + config.most_host_kv_chunks) + config.disk_kv_chunks
        )
        self._has_disk = config.disk_kv_chunks > 0
        self._late_host_slots: list[int] = []
        self._last_stamp = 0.0

    # -- looking up

    def was_computed(self, key: ChunkKey) -> bool:
        """True if the key's chunk was computed here before, even if it is in no tier now."""
        return key in self._by_key or key in self._forgotten

    def has(self, chunk: Chunk) -> bool:
        """True if the keyed chunk has not left the store."""
        return chunk.key is not None and self._by_key.get(chunk.key) is chunk

    @property
    def available(self) -> int:
        """GPU slots that can be taken without a copy or a loss."""
        return self.gpu.free + len(self.reclaimable)

    @property
    def obtainable(self) -> int:
        """GPU slots that can be taken at all, including those whose only copy must be moved or
        dropped first."""
        return self.available + len(self.uncopied)

    def slot_counts(self) -> dict[str, dict[str, int]]:
        """Slots by tier and content. `copy`: the chunk is in a higher tier too. `moving`: being
        written or read (HOST), or written (DISK)."""
        gpu = self.gpu
        host = self.host
        host_only = len(self.host_only) + len(self.host_spare)
        idle = {"free": gpu.free, "reclaimable": len(self.reclaimable), "idle": len(self.uncopied)}
        counts = {
            "gpu": {**idle, "in_use": gpu.count - sum(idle.values())},
            "host": {
                "free": host.free,
                "copy": host.count - host.free - host_only,
                "idle": host_only,
            },
        }
        if self._has_disk:
            host_moving = self.disk.host_slots_moving()
            counts["host"]["moving"] = host_moving
            counts["host"]["copy"] -= host_moving
            copies = len(self.disk_copies) + len(self.host_spare)
            disk = {"free": self.disk.room, "copy": copies, "idle": len(self.disk_only)}
            counts["disk"] = {**disk, "moving": self.disk.count - sum(disk.values())}
        return counts

    def unconfirmed(self, chunk: Chunk) -> bool:
        """True if the chunk's only copy, on HOST, may still fail."""
        return (
            self._copies_may_fail
            and chunk.gpu == NO_SLOT
            and chunk.host != NO_SLOT
            and self.host.last[Lane.OUT][chunk.host] > self.completed.swap_out
        )

    # -- a chunk's life

    def new(self, end: int, now: float) -> Chunk:
        """Returns a private chunk in use, in a free GPU slot. The caller has made room."""
        chunk = Chunk(end, self.gpu.take(), now)
        chunk.users = 1
        self._private[chunk] = None
        return chunk

    def publish(self, chunk: Chunk, key: ChunkKey) -> Chunk:
        """Gives the private, now full chunk its key. Returns the chunk that its row holds from now
        on.

        The first owner of a key keeps it. If that owner has lost its GPU slot, it takes over this
        chunk's slot; otherwise this chunk stays private until its row leaves.
        """
        chunk.tokens = self._chunk_tokens
        owner = self._by_key.get(key)
        if owner is None:
            chunk.key = key
            self._by_key[key] = chunk
            self._regret(self._forgotten.pop(key, NEVER))
            del self._private[chunk]
            return chunk
        if owner.gpu != NO_SLOT:
            return chunk
        if not owner.resident:
            self._regret(owner.dropped_at)
        owner.gpu = chunk.gpu
        chunk.gpu = NO_SLOT
        owner.users += 1
        owner.last_active = max(owner.last_active, chunk.last_active)
        del self._private[chunk]
        self.file(owner)
        return owner

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """One more row holds the chunks, so they do not move."""
        for chunk in chunks:
            chunk.users += 1
            chunk.refused_by_host = False
            self.file(chunk)

    def unpin(self, chunks: Iterable[Chunk], step: int, now: float) -> None:
        """One row fewer holds the chunks. `step`: the last launched step with that row; it may
        still use their GPU slots."""
        computed = self.gpu.last[Lane.COMPUTE]
        for chunk in chunks:
            if chunk.users <= 0:
                raise InvariantError(f"{chunk} is released by a row that does not hold it")
            chunk.users -= 1
            if chunk.last_active < now:
                chunk.last_active = now
            if chunk.gpu >= 0 and computed[chunk.gpu] < step:
                computed[chunk.gpu] = step
            if chunk.users:
                continue
            if chunk.key is None and not chunk.tokens:
                self.drop(chunk)
            else:
                self.file(chunk)

    def claim(self, chunk: Chunk) -> None:
        chunk.claims += 1
        if not chunk.users:
            self.file(chunk)

    def unclaim(self, chunk: Chunk) -> None:
        if chunk.claims <= 0:
            raise InvariantError(f"{chunk} is unclaimed by a conversation that does not claim it")
        chunk.claims -= 1
        self.file(chunk)
        if not (chunk.claims or chunk.users or chunk.resident):
            self._forget(chunk)

    def change_pins(self, chunk: Chunk, by: int) -> None:
        """`by`: 1 if a conversation that claims the chunk becomes pinned, -1 if its pin ends."""
        chunk.pins += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.file(chunk)

    def change_over_quota(self, chunk: Chunk, by: int) -> None:
        """`by`: 1 if a conversation that claims the chunk goes over its owner's quota, -1 if it is
        within the quota again."""
        chunk.over_quota += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.file(chunk)

    def mark_past_window(self, chunk: Chunk) -> None:
        """The context has outgrown its window: the chunk now weighs as much as its others, to be
        evicted with them."""
        if not chunk.past_window:
            chunk.past_window = True
            if not chunk.users:
                self.file(chunk)

    def touch(self, chunk: Chunk, now: float, place: QueuePlace | None = None) -> None:
        """Marks the chunk as used now. `place`: of the request in the queue that waits for it from
        now on."""
        chunk.last_active = max(chunk.last_active, now)
        chunk.refused_by_host = False
        if place is not None:
            at = bisect_left(chunk.queue_places, place)
            if chunk.queue_places[at : at + 1] != [place]:
                chunk.queue_places.insert(at, place)
        self.file(chunk)

    def end_wait(self, chunks: Iterable[Chunk], place: QueuePlace) -> None:
        """The request at that place, which waited for the chunks, has left the queue."""
        for chunk in chunks:
            del chunk.queue_places[bisect_left(chunk.queue_places, place)]
            self.file(chunk)

    def adopt(self, records: Iterable[DiskRecord], now: float) -> None:
        """Makes chunks of the records that an earlier process left on DISK. Called before anything
        is stored. Of two records with one key the first counts.

        Raises InvariantError for a slot that does not exist or has two records.
        """
        records = list(records)
        self.disk.take_slots(record.slot for record in records)
        for record in records:
            if record.key in self._by_key:
                self.disk.release(record.slot, record.key)
                continue
            chunk = Chunk(record.end, NO_SLOT, now - record.age_s)
            chunk.key = record.key
            chunk.tokens = self._chunk_tokens
            chunk.disk = record.slot
            self._by_key[record.key] = chunk
            self.file(chunk)

    def stamp(self, now: float) -> float:
        """Returns `now`, moved up slightly if it is not later than the last stamp: each turn has
        its own stamp."""
        self._last_stamp = max(now, self._last_stamp + 1e-6)
        return self._last_stamp

    # -- swap-ins from HOST

    def reserve_swap_ins(self, chunks: Iterable[Chunk]) -> None:
        """Reserves a free GPU slot for each of the chunks, which are on HOST. The caller has made
        room."""
        for chunk in chunks:
            chunk.gpu = self.gpu.take()
            chunk.awaits_swap_in = True

    def swap_ins_issued(self, chunks: Iterable[Chunk]) -> None:
        """This plan copies the chunks to their GPU slots. A tail gives up its HOST copy, because
        its row will append to it."""
        for chunk in chunks:
            chunk.awaits_swap_in = False
            if chunk.key is None:
                self.release_host_late(chunk)
            self.file(chunk)

    def cancel_swap_ins(self, chunks: Iterable[Chunk]) -> None:
        """Returns the reserved GPU slots. The chunks enter a set of victims when their row releases
        them."""
        for chunk in chunks:
            chunk.awaits_swap_in = False
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT

    # -- slots

    def release_gpu(self, chunk: Chunk) -> None:
        """The chunk leaves the GPU. It is dropped if it is in no other tier."""
        self.gpu.give(chunk.gpu)
        chunk.gpu = NO_SLOT
        chunk.refused_by_host = chunk.copied_for_disk = False
        self.file(chunk)
        if chunk.host == NO_SLOT:
            self._count_if_dropped(chunk)

    def reclaim_gpu(self, victims: Sequence[Chunk]) -> int:
        """Does what `release_gpu` does, for idle chunks of one group. Returns how many of them are
        dropped."""
        for chunk in victims:
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT
            chunk.refused_by_host = chunk.copied_for_disk = False
        victim_set = victims[0].victim_set
        assert isinstance(victim_set, VictimSet)
        dropped = [chunk for chunk in victims if chunk.host == NO_SLOT and chunk.disk == NO_SLOT]
        if self._has_disk:
            for chunk in victims:
                self.file(chunk)
        else:
            victim_set.move([chunk for chunk in victims if chunk.host != NO_SLOT], self.host_only)
            victim_set.move(dropped, None)
        for chunk in dropped:
            self._count_if_dropped(chunk)
        return len(dropped)

    def drop_from_host(self, victims: Sequence[Chunk]) -> None:
        """Does what `drop` does, for chunks of one group of `host_only`."""
        for chunk in victims:
            self.host.give(chunk.host)
            chunk.host = NO_SLOT
        self.host_only.move(victims, None)
        for chunk in victims:
            self._count_if_dropped(chunk)

    def make_reclaimable(self, chunks: Sequence[Chunk]) -> None:
        """Makes the GPU slots of the chunks, which are of one group of `uncopied`, free to take:
        the chunks have been copied, or HOST has refused them."""
        for chunk in chunks:
            chunk.refused_by_host = chunk.host == NO_SLOT
            chunk.copied_for_disk = False
        self.uncopied.move(chunks, self.reclaimable)

    def release_host(self, chunk: Chunk) -> None:
        self.host.give(chunk.host)
        chunk.host = NO_SLOT
        chunk.copied_for_disk = False
        self.file(chunk)
        if chunk.gpu == NO_SLOT:
            self._count_if_dropped(chunk)

    def copied_out(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy to that slot has begun. The caller files the chunk."""
        chunk.host = host_slot
        if self._copies_may_fail:
            self._copied_out[host_slot] = chunk

    def copied_for_disk(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy to that slot, on its way to DISK, has begun."""
        self.copied_out(chunk, host_slot)
        chunk.copied_for_disk = True
        self.file(chunk)

    def drop_bad_copies(self, host_slots: Iterable[int]) -> None:
        """Drops the failed copies in these HOST slots. If a later chunk's copy to a slot has just
        begun, it is dropped as well. A chunk that was copied to make room on the GPU is not copied
        again before its next use."""
        for slot in host_slots:
            chunk = self._copied_out[slot]
            if chunk.host == slot:
                self.bad_copies += 1
                chunk.refused_by_host = chunk.gpu != NO_SLOT and not chunk.copied_for_disk
                self.release_host(chunk)

    def release_disk(self, chunk: Chunk) -> None:
        """The chunk gives up its record, which is not being read."""
        self._release_disk_slot(chunk)
        self.file(chunk)
        self._count_if_dropped(chunk)

    def _release_disk_slot(self, chunk: Chunk) -> None:
        assert chunk.key is not None
        self.disk.release(chunk.disk, chunk.key)
        chunk.disk = NO_SLOT

    def release_host_late(self, chunk: Chunk) -> None:
        """Does what `release_host` does, for a copy that this plan's swap-in still reads. Nothing
        else in this plan may take the slot."""
        self._late_host_slots.append(chunk.host)
        chunk.host = NO_SLOT
        self.file(chunk)
        self._count_if_dropped(chunk)

    def end_plan(self) -> None:
        for slot in self._late_host_slots:
            self.host.give(slot)
        self._late_host_slots.clear()

    def drop(self, chunk: Chunk) -> None:
        """Removes an idle chunk from every tier."""
        chunk.copied_for_disk = False
        move = chunk.moving
        chunk.moving = None
        if move is not None:  # the move keeps both slots until it ends
            self.disk.abandon(move)
            if move.spills:
                chunk.host = NO_SLOT
            else:
                chunk.disk = NO_SLOT
        if chunk.disk != NO_SLOT:
            self._release_disk_slot(chunk)
        if chunk.host != NO_SLOT:
            self.host.give(chunk.host)
            chunk.host = NO_SLOT
        if chunk.gpu != NO_SLOT:
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT
        self.file(chunk)
        self._count_if_dropped(chunk)

    def delete(self, key: ChunkKey) -> None:
        """Drops the key's chunk, unless a conversation claims it. If a row holds it, it stays on
        the GPU and HOST; its records are deleted at once."""
        chunk = self.find(key)
        if chunk is not None and chunk.claims:
            return
        self.disk.delete(key, chunk)
        if chunk is None:
            return
        if not chunk.users:
            self.drop(chunk)
        elif chunk.moving is None and chunk.disk != NO_SLOT:
            self.release_disk(chunk)

    def _count_if_dropped(self, chunk: Chunk) -> None:
        if (
            chunk.gpu == NO_SLOT
            and chunk.host == NO_SLOT
            and chunk.disk == NO_SLOT
            and chunk.users == 0
        ):
            self.dropped += bool(chunk.tokens)
            chunk.dropped_at = self.now
            if not chunk.claims:
                self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        if chunk.key is None:
            self._private.pop(chunk, None)
            return
        if self._by_key.pop(chunk.key, None) is None:
            return
        self._forgotten[chunk.key] = chunk.dropped_at
        self._in_order.append((chunk.key, chunk.dropped_at))
        if len(self._in_order) > self._most_forgotten:
            key, dropped_at = self._in_order.popleft()
            if self._forgotten.get(key) == dropped_at:
                del self._forgotten[key]

    def _regret(self, dropped_at: float) -> None:
        if self.now - dropped_at <= REGRET_S:
            self.regret_tokens += self._chunk_tokens

    # -- work for the disk

    def spill(self, chunk: Chunk, disk_slot: int) -> None:
        """Begins to write the chunk's HOST copy, which is complete, to the DISK slot."""
        chunk.moving = self.disk.spill(chunk, disk_slot)
        self.file(chunk)

    def promote(self, chunk: Chunk, host_slot: int) -> None:
        """Begins to read the chunk's record into the HOST slot, which no copy on any lane uses."""
        chunk.moving = self.disk.promote(chunk, host_slot)
        self.file(chunk)

    def report_disk(self, result: StepResult, now: float) -> None:
        """Applies the result's reports of disk work: chunks get the slots that were written or read
        for them."""
        for move, succeeded in self.disk.report(result, now):
            chunk = move.chunk
            if chunk is None:
                self.disk.release(move.disk, move.key)
                self.host.give(move.host)
                continue
            chunk.moving = None
            if move.spills:
                self._spilled(chunk, move, succeeded)
            else:
                self._promoted(chunk, move, succeeded)

    def _spilled(self, chunk: Chunk, move: Move, succeeded: bool) -> None:
        if succeeded and self.disk.wanted(move.disk, chunk):
            chunk.disk = move.disk
        else:
            self.disk.release(move.disk, move.key)
        self.file(chunk)

    def _promoted(self, chunk: Chunk, move: Move, succeeded: bool) -> None:
        """Ends a read. If it failed, the record is given up, and a chunk that is in no other tier
        is dropped."""
        if succeeded and chunk.host == NO_SLOT:
            chunk.host = move.host
        else:  # the read failed, or the chunk was recomputed and copied out meanwhile
            self.host.give(move.host)
        if succeeded:
            self.file(chunk)
        if not (succeeded and self.disk.wanted(move.disk, chunk)):
            self.release_disk(chunk)

    # -- sets of victims

    def file(self, chunk: Chunk) -> None:
        """Puts the chunk into the set that fits its state. Called after every change of the
        state."""
        victim_set: ChunkSet | None = None
        if chunk.gpu == NO_SLOT:
            if not chunk.users and chunk.moving is None:
                if chunk.host != NO_SLOT:
                    victim_set = self.host_only if chunk.disk == NO_SLOT else self.host_spare
                elif chunk.disk != NO_SLOT:
                    victim_set = self.disk_only
        elif chunk.users:
            if (
                chunk.host != NO_SLOT
                and not (chunk.awaits_swap_in or chunk.copied_for_disk)
                and chunk.moving is None
            ):
                victim_set = self.busy_copied
        elif (
            (chunk.host != NO_SLOT and not chunk.copied_for_disk)
            or chunk.refused_by_host
            or not self.host.count
        ):
            victim_set = self.reclaimable
        else:
            victim_set = self.uncopied
        before = chunk.victim_set
        if before is not victim_set:
            if before is not None:
                before.discard(chunk)
            chunk.victim_set = victim_set
        if victim_set is not None:
            victim_set.add(chunk)
        if self._has_disk:
            on_gpu = chunk.gpu != NO_SLOT and not chunk.awaits_swap_in
            if chunk.disk != NO_SLOT and on_gpu and chunk.moving is None:
                self.disk_copies.add(chunk)
            else:
                self.disk_copies.discard(chunk)

    # -- checks

    @property
    def late_host_slots(self) -> Iterable[int]:
        return self._late_host_slots

    def resident_chunks(self) -> Iterable[Chunk]:
        yield from self._by_key.values()
        yield from self._private
