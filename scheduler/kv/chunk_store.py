"""The chunk store: flat and content-addressed (docs/design/chunk-store.md).

The key of a full chunk hashes its whole prefix, so chunks looked up one by one are found even when leading ones are
gone, and whoever has the same prefix shares them. A keyed chunk is never written again. A chunk without a key is
private: it is being computed, it is an unfilled tail, or it was computed twice side by side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ..config import SchedulerConfig
from ..invariants import Claims, check_store
from ..plan import NO_TICKETS, Lane
from ..types import ChunkKey, InvariantError
from .chunk import NEVER, NO_SLOT, Chunk, OrderedSet
from .disk_tier import DiskTier
from .retention import EvictionPolicy, VictimSet
from .slots import SlotPool
from .stats import REGRET_S, EvictionStats


class ChunkStore:
    """Every chunk that is resident or claimed, its slots, and the sets from which victims come.

    reclaimable     on the GPU, idle, and taken as it is: a HOST copy exists, or is not to be had
    uncopied        on the GPU, idle, and not on HOST, or there for DISK's sake alone
    host_only       idle and only on HOST
    host_spare      idle on HOST, not on the GPU, with a record on DISK: its HOST slot is free to take
    disk_only       idle and only on DISK
    busy_copied     in use on the GPU, with a copy on HOST that is worth only its making, the oldest first
    disk_copies     on DISK and on the GPU, the latest last; beside the set of victims that the chunk is victim_set in
    completed       copies known to be complete on the device, and the last step that was applied
    now             of the latest plan: drops are stamped with it
    spoiled         copies on HOST given up because they are none
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
        self.disk = DiskTier(self, config.disk_kv_chunks)
        self.completed = NO_TICKETS
        self.evictions = EvictionStats()
        self.now = 0.0
        self.spoiled = self.dropped = self.regret_tokens = 0
        self._provisional = config.provisional_copies
        self._copied_out: dict[int, Chunk] = {}  # by HOST slot, if copies are provisional: the last chunk copied there
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
            counts["host"]["moving"] = moving = self.disk.host_slots_moving()
            counts["host"]["copy"] -= moving
            counts["disk"] = self.disk.slot_counts()
        return counts

    def provisional(self, chunk: Chunk) -> bool:
        """On HOST only, and perhaps not there either: its copy is not known to be complete."""
        return (
            self._provisional
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

    def change_surplus(self, chunk: Chunk, by: int) -> None:
        """A conversation that claims the chunk is beyond its owner's quota from now on (1), or no longer (-1)."""
        chunk.surplus += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.file(chunk)

    def bind(self, chunk: Chunk) -> None:
        """Its context has outgrown its window: it weighs as much as the others of it, to go with them."""
        if not chunk.bound:
            chunk.bound = True
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

    def adopt(self, key: ChunkKey, end: int, disk: int, active: float) -> None:
        """A chunk of an earlier life, whose record is in the DISK slot; last active then."""
        chunk = Chunk(end, NO_SLOT, active)
        chunk.key, chunk.tokens, chunk.disk = key, self._chunk_tokens, disk
        self._by_key[key] = chunk
        self.file(chunk)

    def stamp(self, now: float) -> float:
        """`now`, but never twice the same: one stamp is one turn."""
        self._last_stamp = max(now, self._last_stamp + 1e-6)
        return self._last_stamp

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
        """Files these, which are of one group of `uncopied`: they have been copied, or HOST has refused them."""
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
        if self._provisional:
            self._copied_out[host_slot] = chunk

    def release_spoiled(self, host_slots: Iterable[int]) -> None:
        """Copies in these HOST slots are none, whosever they are by now: another's has only just begun. What was to
        make room on the GPU is not copied again before it is used again."""
        for slot in host_slots:
            chunk = self._copied_out[slot]
            if chunk.host == slot:
                self.spoiled += 1
                chunk.refused_by_host = chunk.gpu != NO_SLOT and not chunk.copied_for_disk
                self.release_host(chunk)

    def release_disk(self, chunk: Chunk) -> None:
        """Its record is given up; nobody is reading it."""
        self._vacate_disk(chunk)
        self.file(chunk)
        self._count_if_dropped(chunk)

    def _vacate_disk(self, chunk: Chunk) -> None:
        assert chunk.key is not None
        self.disk.vacate(chunk.disk, chunk.key)
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
        if chunk.moving is not None:
            self.disk.abandon(chunk.moving)
        if chunk.disk != NO_SLOT:
            self._vacate_disk(chunk)
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
        self.disk.doom(key, chunk)
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

    # -- victims

    def file(self, chunk: Chunk) -> None:
        """Puts the chunk into the set its state asks for. Called after every change of it."""
        victim_set: VictimSet | OrderedSet | None = None
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

    def check(self, users: dict[Chunk, int], claims: dict[Chunk, Claims]) -> None:
        """Proves conservation, given what rows and conversations hold. Raises InvariantError. Cost: all chunks."""
        check_store(self, users, claims)
