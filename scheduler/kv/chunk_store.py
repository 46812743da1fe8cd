"""The chunk store: flat and content-addressed (docs/design/chunk-store.md).

The key of a full chunk hashes its whole prefix, so chunks looked up one by one are found even when
leading ones are gone, and contexts with the same prefix share them. A keyed chunk is never written
again. A chunk without a key is private: it is being computed, it is an unfilled tail, or it was
computed twice side by side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from ..config import SchedulerConfig
from ..plan import NO_TICKETS, Lane
from ..types import (
    GPU,
    HOST,
    LOCAL_TIERS,
    SHARED,
    ChunkKey,
    InvariantError,
    QueuePlace,
    StoredRecord,
)
from .chunk import NEVER, NO_SLOT, NOWHERE, Chunk, ChunkSet, Move, OrderedSet, State
from .context import KeyedContext
from .dropped_keys import DroppedKeys
from .lower_tiers import LowerTier, lower_tiers
from .retention import EvictionPolicy
from .slots import SlotPool
from .stats import REGRET_S, EvictionStats
from .victim_sets import VictimSet
from .whereabouts import shared_only


class ChunkStore:
    """Every chunk that is resident or claimed, its slots, and the sets of victims.

    gpu, host       slots of these tiers
    lower           the tiers below HOST that have room for chunks, the fastest first
    shared          the one of these that other servers use too, or None
    spare, only     by tier: idle chunks that are in no faster one. The slot of a spare chunk is
                    free to take, because a slower tier has its KV, or HOST cannot take a copy. The
                    KV of the others must be moved, or is lost
    busy_copied     in use on the GPU, with a copy on HOST: its loss costs only another copy; the
                    oldest first
    copies          by lower tier: chunks with a record there that are also on the GPU, the latest
                    last; such a chunk is also in its set of victims
    pending         keys that a row is computing, with the row's epoch
    completed       copies known to be complete on the device, and the last applied step
    now             time of the latest plan, seconds; drops are stamped with it
    bad_copies      failed copies on HOST, since the start
    dropped         chunks dropped since the start
    regret_tokens   tokens of dropped chunks that were recomputed within REGRET_S
    late_host_slots
                    HOST slots that this plan still reads; they are free with the next one
    lose_state      called with a state of which a piece has been dropped
    delete_state    called with a key whose chunk is deleted; returns the pieces of the state there
    """

    def __init__(self, config: SchedulerConfig, policy: EvictionPolicy):
        self.policy = policy
        self.gpu = SlotPool(config.gpu_kv_chunks, beyond=config.state_chunks)
        self.host = SlotPool(config.host_kv_chunks)
        self.lower = lower_tiers(config)
        self.shared = self.lower.shared
        self.spare = [VictimSet(policy) for _ in LOCAL_TIERS]
        self.only = [VictimSet(policy) for _ in LOCAL_TIERS]
        self.busy_copied = OrderedSet()
        self.copies = {lower.tier: OrderedSet() for lower in self.lower.local}
        self.pending: dict[ChunkKey, int] = {}
        self.completed = NO_TICKETS
        self.evictions = EvictionStats()
        self.now = 0.0
        self.bad_copies = self.dropped = self.regret_tokens = 0
        self._copies_may_fail = config.copies_may_fail
        # by HOST slot, if copies may fail: the last chunk copied there
        self._copied_out: dict[int, Chunk] = {}
        self.chunk_tokens = config.chunk_tokens
        self._by_key: dict[ChunkKey, Chunk] = {}
        self.find: Callable[[ChunkKey], Chunk | None] = self._by_key.get
        """Returns the chunk of the key if it is resident or claimed (a claimed chunk may be
        dropped), else None."""
        # unless the model has states:
        self.lose_state: Callable[[State], None] = lambda _: None
        self.delete_state: Callable[[ChunkKey], Sequence[Chunk]] = lambda _: ()
        self._private: dict[Chunk, None] = {}
        lower_slots = sum(lower.count for lower in self.lower)
        self._forgotten = DroppedKeys(
            4 * (config.gpu_kv_chunks + config.most_host_kv_chunks) + lower_slots
        )
        self.late_host_slots: list[int] = []
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
        return self.gpu.free + len(self.spare[GPU])

    @property
    def obtainable(self) -> int:
        """GPU slots that can be taken at all, including those whose only copy must be moved or
        dropped first."""
        return self.available + len(self.only[GPU])

    def unconfirmed(self, chunk: Chunk) -> bool:
        """True if the chunk's only copy, on HOST, may still fail."""
        return (
            self._copies_may_fail
            and chunk.slots[GPU] == NO_SLOT
            and chunk.slots[HOST] != NO_SLOT
            and self.host.last[Lane.OUT][chunk.slots[HOST]] > self.completed.swap_out
        )

    # -- a chunk's life

    def new(self, end: int, now: float) -> Chunk:
        """Returns a private chunk in use, in a free GPU slot. The caller has made room."""
        chunk = Chunk(end, self.gpu.take(), now)
        chunk.users = 1
        self._private[chunk] = None
        return chunk

    def add_piece(self, piece: Chunk, host_slot: int, pinned: bool) -> None:
        """A new piece of a state is copied to that slot."""
        piece.pins = int(pinned)
        if piece.key is None:
            self._private[piece] = None
        else:
            self._by_key[piece.key] = piece
        self.copied_out(piece, host_slot)
        self.update_victim_set(piece)

    def publish(self, chunk: Chunk, key: ChunkKey) -> Chunk:
        """Gives the private, now full chunk its key. Returns the chunk that its row holds from now
        on.

        The first owner of a key keeps it. If that owner has lost its GPU slot, it takes over this
        chunk's slot; otherwise this chunk stays private until its row leaves.
        """
        chunk.tokens = self.chunk_tokens
        owner = self._by_key.get(key)
        if owner is None:
            chunk.key = key
            self._by_key[key] = chunk
            self._regret(self._forgotten.pop(key))
            del self._private[chunk]
            return chunk
        if owner.slots[GPU] != NO_SLOT:
            return chunk
        if not owner.resident:
            self._regret(owner.dropped_at)
        owner.slots[GPU] = chunk.slots[GPU]
        chunk.slots[GPU] = NO_SLOT
        owner.users += 1
        owner.last_active = max(owner.last_active, chunk.last_active)
        del self._private[chunk]
        self.update_victim_set(owner)
        return owner

    def note_context(self, context: KeyedContext, first: int, end: int) -> None:
        """The context's chunks number `first` up to `end` are in use. `NotedChunkStore` notes
        it."""

    def note_state(self, key: ChunkKey, end: int) -> None:
        """A state after `end` tokens is found by the key from now on; 0: none is.
        `NotedChunkStore` notes it."""

    def note_deletion(self) -> None:
        """The chunks of a conversation whose time is over are dropped. `NotedChunkStore` notes
        it."""

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """One more row holds the chunks, so they do not move."""
        for chunk in chunks:
            chunk.users += 1
            chunk.refused_by_host = False
            self.update_victim_set(chunk)

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
            if chunk.slots[GPU] >= 0 and computed[chunk.slots[GPU]] < step:
                computed[chunk.slots[GPU]] = step
            if chunk.users:
                continue
            if chunk.key is None and not chunk.tokens:
                self.drop(chunk)
            else:
                self.update_victim_set(chunk)

    def claim(self, chunk: Chunk) -> None:
        chunk.claims += 1
        if not chunk.users:
            self.update_victim_set(chunk)

    def unclaim(self, chunk: Chunk) -> None:
        if chunk.claims <= 0:
            raise InvariantError(f"{chunk} is unclaimed by a conversation that does not claim it")
        chunk.claims -= 1
        self.update_victim_set(chunk)
        if not (chunk.claims or chunk.users or chunk.resident):
            self._forget(chunk)

    def change_pins(self, chunk: Chunk, by: int) -> None:
        """`by`: 1 if a conversation that claims the chunk becomes pinned, -1 if its pin ends."""
        chunk.pins += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.update_victim_set(chunk)

    def change_over_quota(self, chunk: Chunk, by: int) -> None:
        """`by`: 1 if a conversation that claims the chunk goes over its owner's quota, -1 if it is
        within the quota again."""
        chunk.over_quota += by
        chunk.refused_by_host = False
        if not chunk.users:
            self.update_victim_set(chunk)

    def mark_past_window(self, chunk: Chunk) -> None:
        """The context has outgrown its window: the chunk now weighs as much as its others, to be
        evicted with them."""
        if not chunk.past_window:
            chunk.past_window = True
            if not chunk.users:
                self.update_victim_set(chunk)

    def touch(self, chunk: Chunk, now: float, place: QueuePlace | None = None) -> None:
        """Marks the chunk as used now. `place`: of the request in the queue that waits for it from
        now on."""
        chunk.last_active = max(chunk.last_active, now)
        chunk.refused_by_host = False
        if place is not None:
            at = bisect_left(chunk.queue_places, place)
            if chunk.queue_places[at : at + 1] != [place]:
                chunk.queue_places.insert(at, place)
        self.update_victim_set(chunk)

    def end_wait(self, chunks: Iterable[Chunk], place: QueuePlace) -> None:
        """The request at that place, which waited for the chunks, has left the queue."""
        for chunk in chunks:
            del chunk.queue_places[bisect_left(chunk.queue_places, place)]
            self.update_victim_set(chunk)
            if chunk.slots[SHARED] != NO_SLOT:
                self._count_if_dropped(chunk, False)

    def adopt(self, lower: LowerTier, record: StoredRecord, tokens: int, active: float) -> Chunk:
        """Makes a chunk of that many tokens, last active then, of a record of an earlier
        process."""
        chunk = Chunk(record.end, NO_SLOT, active)
        chunk.key = record.key
        chunk.tokens = tokens
        chunk.slots[lower.tier] = record.slot
        self._by_key[record.key] = chunk
        self.update_victim_set(chunk)
        return chunk

    def learn(self, key: ChunkKey, end: int, now: float) -> Chunk:
        """The shared tier has the record of the key, whose chunk ends at position `end`. Returns
        the chunk. If it is in no other tier the caller touches it with the place of a request that
        waits for it, or calls `end_wait`."""
        assert self.shared is not None
        chunk = self._by_key.get(key)
        if chunk is None:
            chunk = Chunk(end, NO_SLOT, now)
            chunk.key = key
            chunk.tokens = self.chunk_tokens
            self._by_key[key] = chunk
            chunk.dropped_at = self._forgotten.pop(key)
        if chunk.slots[SHARED] == NO_SLOT:
            chunk.slots[SHARED] = self.shared.new_slot()
        return chunk

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
            chunk.slots[GPU] = self.gpu.take()
            chunk.awaits_swap_in = True

    def swap_ins_issued(self, chunks: Iterable[Chunk]) -> None:
        """This plan copies the chunks to their GPU slots. A tail gives up its HOST copy, because
        its row will append to it."""
        for chunk in chunks:
            chunk.awaits_swap_in = False
            if chunk.key is None:
                self.release_host_late(chunk)
            self.update_victim_set(chunk)

    def cancel_swap_ins(self, chunks: Iterable[Chunk]) -> None:
        """Returns the reserved GPU slots. The chunks enter a set of victims when their row releases
        them."""
        for chunk in chunks:
            chunk.awaits_swap_in = False
            self.gpu.give(chunk.slots[GPU])
            chunk.slots[GPU] = NO_SLOT

    # -- slots

    def release_gpu(self, chunk: Chunk) -> None:
        """The chunk leaves the GPU. It is dropped if it is in no other tier."""
        self.gpu.give(chunk.slots[GPU])
        chunk.slots[GPU] = NO_SLOT
        chunk.refused_by_host = chunk.staged = False
        self.update_victim_set(chunk)
        if chunk.slots[HOST] == NO_SLOT:
            self._count_if_dropped(chunk)

    def reclaim_gpu(self, victims: Sequence[Chunk]) -> int:
        """Does what `release_gpu` does, for idle chunks of one group. Returns how many of them are
        dropped."""
        for chunk in victims:
            self.gpu.give(chunk.slots[GPU])
            chunk.slots[GPU] = NO_SLOT
            chunk.refused_by_host = chunk.staged = False
        victim_set = victims[0].victim_set
        assert isinstance(victim_set, VictimSet)
        if self.lower:
            for chunk in victims:
                self.update_victim_set(chunk)
            dropped = [chunk for chunk in victims if self._is_nowhere(chunk)]
        else:
            dropped = [chunk for chunk in victims if chunk.slots[HOST] == NO_SLOT]
            copied = [chunk for chunk in victims if chunk.slots[HOST] != NO_SLOT]
            victim_set.move(copied, self.only[HOST])
            victim_set.move(dropped, None)
        for chunk in dropped:
            self._count_if_dropped(chunk)
        return len(dropped)

    def drop_from_host(self, victims: Sequence[Chunk]) -> None:
        """Does what `drop` does, for chunks of one group of `only[HOST]`."""
        for chunk in victims:
            self.host.give(chunk.slots[HOST])
            chunk.slots[HOST] = NO_SLOT
        self.only[HOST].move(victims, None)
        for chunk in victims:
            self._count_if_dropped(chunk)

    def make_reclaimable(self, chunks: Sequence[Chunk]) -> None:
        """Makes the GPU slots of the chunks, which are of one group of `only[GPU]`, free to
        take: the chunks have been copied, or HOST has refused them."""
        for chunk in chunks:
            chunk.refused_by_host = chunk.slots[HOST] == NO_SLOT
            chunk.staged = False
        self.only[GPU].move(chunks, self.spare[GPU])

    def release_host(self, chunk: Chunk) -> None:
        self.host.give(chunk.slots[HOST])
        chunk.slots[HOST] = NO_SLOT
        chunk.staged = False
        self.update_victim_set(chunk)
        if chunk.slots[GPU] == NO_SLOT:
            self._count_if_dropped(chunk)

    def copied_out(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy to that slot has begun. The caller files the chunk."""
        chunk.slots[HOST] = host_slot
        if self._copies_may_fail:
            self._copied_out[host_slot] = chunk

    def stage(self, chunk: Chunk, host_slot: int) -> None:
        """The chunk's copy to that slot, on its way to a lower tier, has begun."""
        self.copied_out(chunk, host_slot)
        chunk.staged = True
        self.update_victim_set(chunk)

    def drop_bad_copies(self, host_slots: Iterable[int]) -> None:
        """Drops the failed copies in these HOST slots. If a later chunk's copy to a slot has just
        begun, it is dropped as well. A chunk that was copied to make room on the GPU is not copied
        again before its next use."""
        for slot in host_slots:
            chunk = self._copied_out[slot]
            if chunk.slots[HOST] == slot:
                self.bad_copies += 1
                chunk.refused_by_host = chunk.slots[GPU] != NO_SLOT and not chunk.staged
                self.release_host(chunk)

    def release_record(self, chunk: Chunk, lower: LowerTier) -> None:
        """The chunk gives up its record in the tier, which is not being read."""
        self._release_record(chunk, lower)
        self.update_victim_set(chunk)
        self._count_if_dropped(chunk, lower is not self.shared)

    def _release_record(self, chunk: Chunk, lower: LowerTier) -> None:
        key = chunk.erased_with
        assert key is not None
        lower.release(chunk.slots[lower.tier], key)
        chunk.slots[lower.tier] = NO_SLOT

    def release_host_late(self, chunk: Chunk) -> None:
        """Does what `release_host` does, for a copy that this plan's swap-in still reads. Nothing
        else in this plan may take the slot."""
        self.late_host_slots.append(chunk.slots[HOST])
        chunk.slots[HOST] = NO_SLOT
        self.update_victim_set(chunk)
        self._count_if_dropped(chunk)

    def end_plan(self) -> None:
        for slot in self.late_host_slots:
            self.host.give(slot)
        self.late_host_slots.clear()

    def drop(self, chunk: Chunk) -> None:
        """Removes an idle chunk from every tier."""
        here = not shared_only(chunk)
        chunk.staged = False
        slots = chunk.slots
        move = chunk.moving
        chunk.moving = None
        if move is not None:  # the move keeps both slots until it ends
            slots[HOST if move.spills else move.tier] = NO_SLOT
        for lower in self.lower:
            if move is not None and lower.tier == move.tier:
                lower.abandon(move)
            if slots[lower.tier] != NO_SLOT:
                self._release_record(chunk, lower)
        for tier, pool in ((HOST, self.host), (GPU, self.gpu)):
            if slots[tier] != NO_SLOT:
                pool.give(slots[tier])
                slots[tier] = NO_SLOT
        self.update_victim_set(chunk)
        self._count_if_dropped(chunk, here)

    def delete(self, key: ChunkKey) -> None:
        """Drops the key's chunk and the state there, unless a conversation claims the chunk. What a
        row holds stays on the GPU and HOST; its records are deleted at once."""
        chunk = self.find(key)
        if chunk is not None and chunk.claims:
            return
        pieces = self.delete_state(key)
        chunks = pieces if chunk is None else (chunk, *pieces)
        for lower in self.lower:
            lower.erase(key, chunks)
        for one in chunks:
            if not one.users:
                if one.resident:
                    self.drop(one)
                continue
            for lower in self.lower:
                if one.moving is None and one.slots[lower.tier] != NO_SLOT:
                    self.release_record(one, lower)

    def _is_nowhere(self, chunk: Chunk) -> bool:
        """True if the chunk is in no tier. If only the shared tier has it, and no request waits for
        it, that is forgotten: the store is asked again."""
        slots = chunk.slots
        if slots[SHARED] != NO_SLOT and not chunk.queue_places and chunk.moving is None:
            assert self.shared is not None and chunk.key is not None
            if slots[:SHARED] == NOWHERE[:SHARED]:
                self.shared.release(slots[SHARED], chunk.key)
                slots[SHARED] = NO_SLOT
        return slots == NOWHERE

    def _count_if_dropped(self, chunk: Chunk, here: bool = True) -> None:
        """`here`: False if only the shared tier had the chunk, which does not count."""
        if self._is_nowhere(chunk) and not chunk.users:
            if here:
                self.dropped += bool(chunk.tokens)
                chunk.dropped_at = self.now
            if not chunk.claims:
                self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        if chunk.state is not None:
            self.lose_state(chunk.state)
        if chunk.key is None:
            self._private.pop(chunk, None)
            return
        gone = self._by_key.pop(chunk.key, None)
        if gone is None or chunk.state is not None or chunk.dropped_at == NEVER:
            return
        self._forgotten.add(chunk.key, chunk.dropped_at)

    def _regret(self, dropped_at: float) -> None:
        if self.now - dropped_at <= REGRET_S:
            self.regret_tokens += self.chunk_tokens

    # -- moves to and from lower tiers

    def spill(self, chunk: Chunk, lower: LowerTier) -> None:
        """Begins to write the chunk's HOST copy, which is complete, to the tier, which has room."""
        chunk.moving = lower.begin_write(chunk)
        self.update_victim_set(chunk)

    def promote(self, chunk: Chunk, host_slot: int) -> None:
        """Begins to read the chunk's record into the HOST slot, which no copy on any lane uses."""
        lower = next(lower for lower in self.lower if chunk.slots[lower.tier] != NO_SLOT)
        chunk.moving = lower.begin_read(chunk, host_slot)
        self.update_victim_set(chunk)

    def leave_move(self, move: Move, lower: LowerTier) -> None:
        """The move's chunk waits for its read no more. The move keeps its HOST slot until it is
        reported."""
        chunk = move.chunk
        if chunk is not None:
            lower.abandon(move)
            chunk.moving = None
            self.release_record(chunk, lower)

    # -- sets of victims

    # A chunk's states. "lower": in some tier below HOST of this server; a record in the shared tier
    # changes no set. An idle chunk is held by no row.
    #
    # | GPU | HOST   | lower | state                      | set          | changes                |
    # | --- | ------ | ----- | -------------------------- | ------------ | ---------------------- |
    # | -   | -      | -     | dropped                    | none         | computed, or forgotten |
    # | yes | -      | any   | in use                     | none         | released, deleted      |
    # | yes | yes    | any   | in use                     | busy_copied  | released, loses a copy |
    # | yes | yes    | any   | in use: awaits its swap-in | none         | swapped in, reported   |
    # |     |        |       | or is staged or moving     |              |                        |
    # | yes | -      | any   | idle                       | only[GPU]    | used, swapped out,     |
    # |     |        |       |                            |              | staged, dropped        |
    # | yes | - or   | any   | idle, and HOST has refused | spare[GPU]   | used, dropped, touched |
    # |     | staged |       | it or has no slots         |              | (asks HOST again)      |
    # | yes | staged | any   | idle, on its way down      | only[GPU]    | spilled, then loses    |
    # |     |        |       |                            |              | this copy              |
    # | yes | yes    | any   | idle                       | spare[GPU]   | used, leaves the GPU,  |
    # |     |        |       |                            |              | loses a copy           |
    # | -   | yes    | -     | idle                       | only[HOST]   | swapped in, spilled,   |
    # |     |        |       |                            |              | dropped                |
    # | -   | yes    | yes   | idle                       | spare[HOST]  | swapped in, loses copy |
    # | -   | -      | one   | idle                       | only[tier]   | promoted, dropped      |
    # | -   | -      | more  | idle                       | spare[the    | promoted, loses a copy |
    # |     |        |       |                            | fastest]     |                        |
    # | -   | any    | any   | moving: written or read    | none         | reported, dropped,     |
    # |     |        |       |                            |              | computed again         |
    #
    # A move never changes the set of a chunk that is idle on the GPU.

    def update_victim_set(self, chunk: Chunk) -> None:
        """Puts the chunk into the set that the table gives. Called after every change of its
        state."""
        slots = chunk.slots
        victim_set: ChunkSet | None = None
        if slots[GPU] == NO_SLOT:
            if not chunk.users and chunk.moving is None:
                tiers = [tier for tier in LOCAL_TIERS if slots[tier] != NO_SLOT]
                if tiers:
                    victim_set = (self.spare if len(tiers) > 1 else self.only)[tiers[0]]
        elif chunk.users:
            if (
                slots[HOST] != NO_SLOT
                and not (chunk.awaits_swap_in or chunk.staged)
                and chunk.moving is None
            ):
                victim_set = self.busy_copied
        elif (
            (slots[HOST] != NO_SLOT and not chunk.staged)
            or chunk.refused_by_host
            or not self.host.count
        ):
            victim_set = self.spare[GPU]
        else:
            victim_set = self.only[GPU]
        before = chunk.victim_set
        if before is not victim_set:
            if before is not None:
                before.discard(chunk)
            chunk.victim_set = victim_set
        if victim_set is not None:
            victim_set.add(chunk)
        if self.copies:
            on_gpu = slots[GPU] != NO_SLOT and not chunk.awaits_swap_in
            for tier, copies in self.copies.items():
                if slots[tier] != NO_SLOT and on_gpu and chunk.moving is None:
                    copies.add(chunk)
                else:
                    copies.discard(chunk)

    # -- checks

    def resident_chunks(self) -> Iterable[Chunk]:
        yield from self._by_key.values()
        yield from self._private
