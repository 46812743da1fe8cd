"""The chunk store: flat and content-addressed (DESIGN section 3).

The key of a full chunk hashes its whole prefix, so chunks looked up one by one are found even when leading ones are
gone, and whoever has the same prefix shares them. A keyed chunk is never written again. A chunk without a key is
private: it is being computed, it is an unfilled tail, or it was computed twice side by side.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf

from .config import SchedulerConfig
from .evictions import REGRET_S, Evictions
from .plan import Lane
from .retention import EvictionPolicy, Group, VictimSet
from .slots import SlotPool
from .types import ChunkKey, InvariantError

NO_SLOT = -1
NEVER = -inf


def root_key(seed: bytes, chunk_tokens: int, salt: bytes) -> ChunkKey:
    """Where a chain of keys starts: everything but the tokens that changes KV, and the salt."""
    parts = (seed, chunk_tokens.to_bytes(4, "little"), salt)
    return ChunkKey(hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest())


def chunk_key(previous: ChunkKey, tokens: array[int], start: int, end: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(previous + tokens[start:end].tobytes()).digest())


class OrderedSet(OrderedDict["Chunk", None]):
    """A set in the order of insertion, cheap to look at and to take from at its front (a plain dict is not)."""

    def add(self, chunk: Chunk) -> None:
        self[chunk] = None

    def discard(self, chunk: Chunk) -> None:
        self.pop(chunk, None)


class Chunk:
    """end          position after its last token when full
    tokens       leading tokens whose KV is valid: all of a keyed chunk, fewer in a tail
    gpu, host    its slot in the tier, or NO_SLOT; both may be valid at once
    users        rows that hold it; claims: conversations that reference it
    pins         of these conversations, those that are pinned: it is evicted last
    loading      its swap-in is reserved but not all issued: the GPU slot holds nothing yet
    filed        the set of victims it is in, and group the part of a VictimSet
    declined     HOST has no room for one of so low a value: dropped when its GPU slot is needed
    dropped_at   when it was last dropped
    """

    __slots__ = (
        "born",
        "claims",
        "declined",
        "dropped_at",
        "end",
        "filed",
        "gpu",
        "group",
        "host",
        "key",
        "last_active",
        "loading",
        "pins",
        "tokens",
        "users",
    )

    def __init__(self, end: int, gpu: int, now: float):
        self.key: ChunkKey | None = None
        self.end = end
        self.tokens = 0
        self.gpu = gpu
        self.host = NO_SLOT
        self.users = 0
        self.claims = 0
        self.pins = 0
        self.born = self.last_active = now
        self.dropped_at = NEVER
        self.loading = False
        self.declined = False
        self.filed: VictimSet | OrderedSet | None = None
        self.group: Group | None = None

    @property
    def resident(self) -> bool:
        return self.gpu != NO_SLOT or self.host != NO_SLOT

    def __repr__(self) -> str:
        name = self.key.hex()[:8] if self.key else "private"
        return f"Chunk({name} to {self.end}, gpu={self.gpu} host={self.host} users={self.users} claims={self.claims})"


class ChunkStore:
    """Every chunk that is resident or claimed, its slots, and the sets from which victims come.

    reclaimable     on the GPU, idle, and safe to take: a HOST copy exists, or HOST declined it
    uncopied        on the GPU, idle, the only copy
    host_only       idle and only on HOST
    busy_copied     in use on the GPU, with a copy on HOST that is worth only its making, the oldest first
    now             of the latest plan: drops are stamped with it
    dropped         chunks dropped so far; regret_tokens: of those computed again within REGRET_S
    """

    def __init__(self, config: SchedulerConfig, policy: EvictionPolicy):
        self.policy = policy
        self.gpu = SlotPool(config.gpu_kv_chunks)
        self.host = SlotPool(config.host_kv_chunks)
        self.reclaimable = VictimSet(policy)
        self.uncopied = VictimSet(policy)
        self.host_only = VictimSet(policy)
        self.busy_copied = OrderedSet()
        self.evictions = Evictions()
        self.now = 0.0
        self.dropped = self.regret_tokens = 0
        self._chunk_tokens = config.chunk_tokens
        self._by_key: dict[ChunkKey, Chunk] = {}
        self.find: Callable[[ChunkKey], Chunk | None] = self._by_key.get
        """The chunk of that key if it is resident or claimed (then perhaps dropped)."""
        self._private: dict[Chunk, None] = {}
        self._forgotten: OrderedDict[ChunkKey, float] = OrderedDict()  # and when they were dropped
        self._most_forgotten = 4 * (config.gpu_kv_chunks + config.host_kv_chunks)
        self._late_host_slots: list[int] = []

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
        """Slots by tier and by what is in them; a copy on HOST is of a chunk that is on the GPU too."""
        gpu, host, host_only = self.gpu, self.host, len(self.host_only)
        idle = {"free": gpu.free, "reclaimable": len(self.reclaimable), "idle": len(self.uncopied)}
        return {
            "gpu": {**idle, "in_use": gpu.count - sum(idle.values())},
            "host": {"free": host.free, "copy": host.count - host.free - host_only, "idle": host_only},
        }

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
        if owner.host == NO_SLOT:
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
            chunk.declined = False
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
        chunk.declined = False
        if not chunk.users:
            self.file(chunk)

    def touch(self, chunk: Chunk, now: float) -> None:
        """Its conversation is active: the user has written."""
        chunk.last_active = max(chunk.last_active, now)
        chunk.declined = False
        self.file(chunk)

    # -- slots

    def release_gpu(self, chunk: Chunk) -> None:
        """The chunk leaves the GPU; dropped if it is nowhere else."""
        self.gpu.give(chunk.gpu)
        chunk.gpu = NO_SLOT
        chunk.declined = False
        self.file(chunk)
        if chunk.host == NO_SLOT:
            self._count_if_dropped(chunk)

    def reclaim_gpu(self, victims: Sequence[Chunk]) -> int:
        """As `release_gpu` for these, which are idle and of one group. Returns how many are dropped thereby."""
        for chunk in victims:
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT
            chunk.declined = False
        filed = victims[0].filed
        assert isinstance(filed, VictimSet)
        filed.move([chunk for chunk in victims if chunk.host != NO_SLOT], self.host_only)
        dropped = [chunk for chunk in victims if chunk.host == NO_SLOT]
        filed.move(dropped, None)
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
        """Files these, which are of one group of `uncopied`: they have been copied or declined."""
        self.uncopied.move(chunks, self.reclaimable)

    def release_host(self, chunk: Chunk) -> None:
        self.host.give(chunk.host)
        chunk.host = NO_SLOT
        self.file(chunk)
        if chunk.gpu == NO_SLOT:
            self._count_if_dropped(chunk)

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
        if chunk.host != NO_SLOT:
            self.host.give(chunk.host)
            chunk.host = NO_SLOT
        if chunk.gpu != NO_SLOT:
            self.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT
        self.file(chunk)
        self._count_if_dropped(chunk)

    def _count_if_dropped(self, chunk: Chunk) -> None:
        if chunk.gpu == NO_SLOT and chunk.host == NO_SLOT and chunk.users == 0:
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
        filed: VictimSet | OrderedSet | None = None
        if chunk.gpu == NO_SLOT:
            if chunk.host != NO_SLOT and not chunk.users:
                filed = self.host_only
        elif chunk.users:
            if chunk.host != NO_SLOT and not chunk.loading:
                filed = self.busy_copied
        elif chunk.host != NO_SLOT or chunk.declined or not self.host.count:
            filed = self.reclaimable
        else:
            filed = self.uncopied
        before = chunk.filed
        if before is not filed:
            if before is not None:
                before.discard(chunk)
            chunk.filed = filed
        if filed is not None:
            filed.add(chunk)

    # -- proof

    def resident_chunks(self) -> Iterable[Chunk]:
        yield from self._by_key.values()
        yield from self._private

    def check(self, users: dict[Chunk, int], claims: dict[Chunk, int], pins: dict[Chunk, int]) -> None:
        """Conservation: slots are free or owned once; users, claims and pins are those of rows and conversations."""
        chunks = list(self.resident_chunks())
        self.gpu.check(chunk.gpu for chunk in chunks if chunk.gpu != NO_SLOT)
        self.host.check([*(chunk.host for chunk in chunks if chunk.host != NO_SLOT), *self._late_host_slots])
        known = set(chunks)
        for held in (users, claims, pins):
            if not known.issuperset(held):
                raise InvariantError(f"held but not in the store: {set(held) - known}")
        filed = 0
        for chunk in chunks:
            if chunk.users != users.get(chunk, 0) or chunk.claims != claims.get(chunk, 0):
                raise InvariantError(f"{chunk}: {users.get(chunk, 0)} rows and {claims.get(chunk, 0)} claims hold it")
            if chunk.pins != pins.get(chunk, 0):
                raise InvariantError(f"{chunk} is pinned {chunk.pins} times, by {pins.get(chunk, 0)} conversations")
            if chunk.key is not None and self._by_key.get(chunk.key) is not chunk:
                raise InvariantError(f"{chunk} is not the owner of its key")
            if chunk.users and chunk.gpu == NO_SLOT:
                raise InvariantError(f"{chunk} is in use but not on the GPU")
            if not (chunk.resident or chunk.claims):
                raise InvariantError(f"{chunk} is nowhere and nobody's, but still in the store")
            filed += self._check_filing(chunk)
        members = len(self.reclaimable) + len(self.uncopied) + len(self.host_only) + len(self.busy_copied)
        if filed != members:
            raise InvariantError("a chunk is filed where it does not belong")

    def _check_filing(self, chunk: Chunk) -> bool:
        """Decides anew, apart from `file`, where the chunk belongs; returns whether that is anywhere."""
        on_gpu, on_host = chunk.gpu != NO_SLOT, chunk.host != NO_SLOT
        belongs: VictimSet | OrderedSet | None = None
        if chunk.users and on_gpu and on_host and not chunk.loading:
            belongs = self.busy_copied
        if not chunk.users and on_host and not on_gpu:
            belongs = self.host_only
        if not chunk.users and on_gpu:
            belongs = self.reclaimable if on_host or chunk.declined or self.host.count == 0 else self.uncopied
        if chunk.filed is not belongs or (belongs is not None and chunk not in belongs):
            raise InvariantError(f"{chunk} is not filed where it belongs")
        return belongs is not None
