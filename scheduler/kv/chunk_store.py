"""The chunk store: flat and content-addressed (docs/design/chunk-store.md).

The key of a full chunk hashes its whole prefix, so chunks looked up one by one are found even when leading ones are
gone, and contexts with the same prefix share them. A keyed chunk is never written again. A chunk without a key is
private: it is being computed, it is an unfilled tail, or it was computed twice side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..config import SchedulerConfig
from ..plan import NO_TICKETS, Lane, StepResult
from ..types import ChunkKey, DiskRecord, InvariantError
from .chunk import NEVER, NO_SLOT, Chunk, ChunkSet, Move, OrderedSet
from .disk_tier import DiskTier
from .retention import EvictionPolicy
from .slots import SlotPool
from .stats import REGRET_S, EvictionStats
from .victim_sets import VictimSet


class ChunkStore:
    """Every chunk that is resident or claimed, its slots, and the sets from which victims come.

    reclaimable     on the GPU, idle, and taken as it is: a HOST copy exists, or is not to be had
    uncopied        on the GPU, idle, and not on HOST, or there for DISK's sake alone
    host_only       idle and only on HOST
    host_spare      idle on HOST, not on the GPU, with a record on DISK: its HOST slot is free to take
    disk_only       idle and only on DISK
    busy_copied     in use on the GPU, with a copy on HOST that is worth only its making, the oldest first
    disk_copies     on DISK and on the GPU, the latest last; beside the set of victims that the chunk is victim_set in
    pending         keys that a row is computing, with the row's epoch
    completed       copies known to be complete on the device, and the last step that was applied
    now             of the latest plan: drops are stamped with it
    bad_copies      copies on HOST given up because they failed
    dropped         chunks dropped so far; regret_tokens: of those computed again within REGRET_S
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
        self._copied_out: dict[int, Chunk] = {}  # by HOST slot, if copies may fail: the last chunk copied there
        self._chunk_tokens = config.chunk_tokens
        self._by_key: dict[ChunkKey, Chunk] = {}
        self.find: Callable[[ChunkKey], Chunk | None] = self._by_key.get
        """The chunk of that key if it is resident or claimed (then perhaps dropped)."""
        self._private: dict[Chunk, None] = {}
        self._forgotten: OrderedDict[ChunkKey, float] = OrderedDict()  # and when they were dropped
        self._most_forgotten = 4 * (config.gpu_kv_chunks + config.host_kv_chunks) + config.disk_kv_chunks
        self._has_disk = config.disk_kv_chunks > 0
        self._late_host_slots: list[int] = []
        self._last_stamp = 0.0

    # -- looking up

    def known(self, key: ChunkKey) -> bool:
        """Computed here before, whether or not it still is anywhere."""
        return key in self._by_key or key in self._forgotten

    @property
    def available(self) -> int:
        """GPU slots that cost nothing to take."""
        return self.gpu.free + len(self.reclaimable)

    @property
    def obtainable(self) -> int:
        """GPU slots that can be had at all: also those whose only copy must be moved or dropped first."""
        return self.available + len(self.uncopied)

    def slot_counts(self) -> dict[str, dict[str, int]]:
        """Slots by tier and by what is in them; a copy is of a chunk that is in a tier above too, one that is moving is
        being written or read (HOST) or written (DISK)."""
        gpu, host, host_only = self.gpu, self.host, len(self.host_only) + len(self.host_spare)
        idle = {"free": gpu.free, "reclaimable": len(self.reclaimable), "idle": len(self.uncopied)}
        counts = {
            "gpu": {**idle, "in_use": gpu.count - sum(idle.values())},
            "host": {"free": host.free, "copy": host.count - host.free - host_only, "idle": host_only},
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
        """Its only copy, on HOST, is not known to be complete and may fail."""
        return (
            self._copies_may_fail
            and chunk.gpu == NO_SLOT
            and chunk.host != NO_SLOT
            and self.host.last[Lane.OUT][chunk.host] > self.completed.swap_out
        )

    # -- a chunk's life

    def new(self, end: int, now: float) -> Chunk:
        """A private chunk in use, in a free GPU slot (the caller made room)."""
        chunk = Chunk(end, self.gpu.take(), now)
        chunk.users = 1
        self._private[chunk] = None
        return chunk

    def publish(self, chunk: Chunk, key: ChunkKey) -> Chunk:
        """The private, now full chunk gets its key. Returns the chunk its row is to hold from now on.

        The first owner of a key keeps it. If that one has lost its GPU slot meanwhile it takes over this chunk's;
        otherwise this one stays private until its row leaves.
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
        owner.gpu, chunk.gpu = chunk.gpu, NO_SLOT
        owner.users += 1
        owner.last_active = max(owner.last_active, chunk.last_active)
        del self._private[chunk]
        self.file(owner)
        return owner

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """One more row holds the chunks: they do not move."""
        for chunk in chunks:
            chunk.users += 1
            chunk.refused_by_host = False
            self.file(chunk)

    def unpin(self, chunks: Iterable[Chunk], step: int, now: float) -> None:
        """One row less holds them; `step` is the last one launched with that row and may still use their GPU slots."""
        computed = self.gpu.last[Lane.COMPUTE]
        for chunk in chunks:
            if chunk.users <= 0:
                raise InvariantError(f"{chunk} is let go by a row that does not hold it")
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
        """A conversation that claims the chunk begins (1) or ceases (-1) to be pinned."""
        chunk.pins += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.file(chunk)

    def change_over_quota(self, chunk: Chunk, by: int) -> None:
        """A conversation that claims the chunk is beyond its owner's quota from now on (1), or no longer (-1)."""
        chunk.over_quota += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.file(chunk)

    def mark_past_window(self, chunk: Chunk) -> None:
        """Its context has outgrown its window: it weighs as much as the others of it, to go with them."""
        if not chunk.past_window:
            chunk.past_window = True
            if not chunk.users:
                self.file(chunk)

    def touch(self, chunk: Chunk, now: float, awaited: int = 0) -> None:
        """Its conversation is active: the user has written, and waits at that place in the queue."""
        chunk.last_active = max(chunk.last_active, now)
        chunk.refused_by_host = False
        if awaited and not 0 < chunk.queue_place < awaited:
            chunk.queue_place = awaited
        self.file(chunk)

    def end_wait(self, chunks: Iterable[Chunk]) -> None:
        """The request that awaited them has left the queue."""
        for chunk in chunks:
            if chunk.queue_place:
                chunk.queue_place = 0
                self.file(chunk)

    def adopt(self, records: Iterable[DiskRecord], now: float) -> None:
        """Makes chunks of the records that an earlier process left on DISK; before anything is stored. Of two records
        with one key the first counts.

        Raises InvariantError for a slot that does not exist or has two records.
        """
        records = list(records)
        self.disk.take_slots(record.slot for record in records)
        for record in records:
            if record.key in self._by_key:
                self.disk.release(record.slot, record.key)
                continue
            chunk = Chunk(record.end, NO_SLOT, now - record.age_s)
            chunk.key, chunk.tokens, chunk.disk = record.key, self._chunk_tokens, record.slot
            self._by_key[record.key] = chunk
            self.file(chunk)

    def stamp(self, now: float) -> float:
        """`now`, but never twice the same: one stamp is one turn."""
        self._last_stamp = max(now, self._last_stamp + 1e-6)
        return self._last_stamp

    # -- loading from HOST

    def begin_loads(self, chunks: Iterable[Chunk]) -> None:
        """Reserves a free GPU slot for each of these, which are on HOST (the caller made room)."""
        for chunk in chunks:
            chunk.gpu, chunk.loading = self.gpu.take(), True

    def loads_issued(self, chunks: Iterable[Chunk]) -> None:
        """This plan copies the chunks to their GPU slots. A tail's HOST copy ends: the tail is about to be appended
        to."""
        for chunk in chunks:
            chunk.loading = False
            if chunk.key is None:
                self.release_host_late(chunk)
            self.file(chunk)

    def cancel_loads(self, chunks: Iterable[Chunk]) -> None:
        """Gives the reserved GPU slots back; the chunks are filed when their row lets them go."""
        for chunk in chunks:
            chunk.loading = False
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT

    # -- slots

    def release_gpu(self, chunk: Chunk) -> None:
        """The chunk leaves the GPU; dropped if it is nowhere else."""
        self.gpu.give(chunk.gpu)
        chunk.gpu = NO_SLOT
        chunk.refused_by_host = chunk.copied_for_disk = False
        self.file(chunk)
        if chunk.host == NO_SLOT:
            self._count_if_dropped(chunk)

    def reclaim_gpu(self, victims: Sequence[Chunk]) -> int:
        """As `release_gpu` for these, which are idle and of one group. Returns how many are dropped thereby."""
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
        """As `drop` for these, which are of one group of `host_only`."""
        for chunk in victims:
            self.host.give(chunk.host)
            chunk.host = NO_SLOT
        self.host_only.move(victims, None)
        for chunk in victims:
            self._count_if_dropped(chunk)

    def make_reclaimable(self, chunks: Sequence[Chunk]) -> None:
        """The GPU slots of these, which are of one group of `uncopied`, are free to take: they have been copied, or
        HOST has refused them."""
        for chunk in chunks:
            chunk.refused_by_host, chunk.copied_for_disk = chunk.host == NO_SLOT, False
        self.uncopied.move(chunks, self.reclaimable)

    def release_host(self, chunk: Chunk) -> None:
        self.host.give(chunk.host)
        chunk.host = NO_SLOT
        chunk.copied_for_disk = False
        self.file(chunk)
        if chunk.gpu == NO_SLOT:
            self._count_if_dropped(chunk)

    def copied_out(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy in that slot has begun; the caller files it."""
        chunk.host = host_slot
        if self._copies_may_fail:
            self._copied_out[host_slot] = chunk

    def copied_for_disk(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy in that slot has begun, on its way to DISK."""
        self.copied_out(chunk, host_slot)
        chunk.copied_for_disk = True
        self.file(chunk)

    def drop_bad_copies(self, host_slots: Iterable[int]) -> None:
        """A copy to each of these HOST slots has failed: the slot's chunk loses its copy, also a later chunk, whose
        copy has only just begun. A chunk copied to make room on the GPU is not copied again before it is used."""
        for slot in host_slots:
            chunk = self._copied_out[slot]
            if chunk.host == slot:
                self.bad_copies += 1
                chunk.refused_by_host = chunk.gpu != NO_SLOT and not chunk.copied_for_disk
                self.release_host(chunk)

    def release_disk(self, chunk: Chunk) -> None:
        """Gives up its record, which is not being read."""
        self._release_disk_slot(chunk)
        self.file(chunk)
        self._count_if_dropped(chunk)

    def _release_disk_slot(self, chunk: Chunk) -> None:
        assert chunk.key is not None
        self.disk.release(chunk.disk, chunk.key)
        chunk.disk = NO_SLOT

    def release_host_late(self, chunk: Chunk) -> None:
        """As `release_host` for a copy that this plan's swap-in still reads: nothing of this plan may take the slot."""
        self._late_host_slots.append(chunk.host)
        chunk.host = NO_SLOT
        self.file(chunk)
        self._count_if_dropped(chunk)

    def end_plan(self) -> None:
        for slot in self._late_host_slots:
            self.host.give(slot)
        self._late_host_slots.clear()

    def drop(self, chunk: Chunk) -> None:
        """An idle chunk leaves every tier."""
        chunk.copied_for_disk = False
        move, chunk.moving = chunk.moving, None
        if move is not None:  # until its end the work has both slots
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
        """What there is of that chunk goes, unless a conversation claims it. A row that holds it keeps it on the GPU
        and HOST; its records go at once."""
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
        if chunk.gpu == NO_SLOT and chunk.host == NO_SLOT and chunk.disk == NO_SLOT and chunk.users == 0:
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
        if len(self._forgotten) > self._most_forgotten:
            self._forgotten.popitem(last=False)

    def _regret(self, dropped_at: float) -> None:
        if self.now - dropped_at <= REGRET_S:
            self.regret_tokens += self._chunk_tokens

    # -- work for the disk

    def spill(self, chunk: Chunk, disk_slot: int) -> None:
        """Begins to write the chunk's HOST copy, which is complete, into the DISK slot."""
        chunk.moving = self.disk.spill(chunk, disk_slot)
        self.file(chunk)

    def promote(self, chunk: Chunk, host_slot: int) -> None:
        """Begins to read the chunk's record into the HOST slot, which no copy on any lane uses."""
        chunk.moving = self.disk.promote(chunk, host_slot)
        self.file(chunk)

    def report_disk(self, result: StepResult, now: float) -> None:
        """Takes what the result says of the disk: chunks get the slots that have been written or read for them."""
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
        """After a failed read the record is given up: the chunk is dropped if it is in no other tier."""
        if succeeded and chunk.host == NO_SLOT:
            chunk.host = move.host
        else:  # not read, or computed again and copied out meanwhile
            self.host.give(move.host)
        if succeeded:
            self.file(chunk)
        if not (succeeded and self.disk.wanted(move.disk, chunk)):
            self.release_disk(chunk)

    # -- victims

    def file(self, chunk: Chunk) -> None:
        """Puts the chunk into the set its state asks for. Called after every change of it."""
        victim_set: ChunkSet | None = None
        if chunk.gpu == NO_SLOT:
            if not chunk.users and chunk.moving is None:
                if chunk.host != NO_SLOT:
                    victim_set = self.host_only if chunk.disk == NO_SLOT else self.host_spare
                elif chunk.disk != NO_SLOT:
                    victim_set = self.disk_only
        elif chunk.users:
            if chunk.host != NO_SLOT and not (chunk.loading or chunk.copied_for_disk) and chunk.moving is None:
                victim_set = self.busy_copied
        elif (chunk.host != NO_SLOT and not chunk.copied_for_disk) or chunk.refused_by_host or not self.host.count:
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
            on_gpu = chunk.gpu != NO_SLOT and not chunk.loading
            if chunk.disk != NO_SLOT and on_gpu and chunk.moving is None:
                self.disk_copies.add(chunk)
            else:
                self.disk_copies.discard(chunk)

    # -- proof

    @property
    def late_host_slots(self) -> Iterable[int]:
        return self._late_host_slots

    def resident_chunks(self) -> Iterable[Chunk]:
        yield from self._by_key.values()
        yield from self._private
