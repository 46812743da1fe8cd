"""One chunk of KV: its slots, its users and claims, and its last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from ..types import ChunkKey

NO_SLOT = -1
NEVER = -inf


class OrderedSet(OrderedDict["Chunk", None]):
    """A set in the order of insertion, cheap to look at and to take from at its front (a plain dict is not)."""

    def add(self, chunk: Chunk) -> None:
        self[chunk] = None

    def discard(self, chunk: Chunk) -> None:
        self.pop(chunk, None)


class ChunkSet(Protocol):
    """A set of chunks, each of which is in one such set at most."""

    def add(self, chunk: Chunk) -> None: ...

    def discard(self, chunk: Chunk) -> None: ...


class Move:
    """One spill or promotion that has begun. `chunk` is None once it was dropped: then both slots are the work's."""

    __slots__ = ("chunk", "disk", "host", "key", "spills")

    def __init__(self, chunk: Chunk, key: ChunkKey, host: int, disk: int, spills: bool):
        self.chunk: Chunk | None = chunk
        self.key = key
        self.host, self.disk, self.spills = host, disk, spills


class Group:
    """Chunks of one weight class and one stamp, such as those of one turn: their V is the same at any time."""

    __slots__ = ("_last", "_sorted", "chunks", "number", "stamp")

    def __init__(self, number: int, stamp: float):
        self.number, self.stamp = number, stamp
        self.chunks: dict[Chunk, None] = {}
        self._sorted, self._last = True, 0

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk] = None
        if chunk.end < self._last:
            self._sorted = False  # they mostly come in order of position
        self._last = chunk.end

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks in the order of position."""
        self.chunks.update(dict.fromkeys(chunks))
        if chunks[0].end < self._last:
            self._sorted = False
        self._last = chunks[-1].end

    def leading(self, most: int) -> list[Chunk]:
        """The first ones by position."""
        if not self._sorted:
            self.chunks = dict.fromkeys(sorted(self.chunks, key=attrgetter("end")))
            self._sorted, self._last = True, next(reversed(self.chunks)).end
        return list(islice(self.chunks, most))


class Claims(NamedTuple):
    """Conversations that claim one chunk: all, the pinned ones, and those over their owners' quotas."""

    claims: int
    pins: int = 0
    over_quota: int = 0


class Chunk:
    """end             position after its last token when full
    tokens          leading tokens whose KV is valid: all of a keyed chunk, fewer in a tail
    gpu, host, disk
                    its slot in the tier, or NO_SLOT; several may be valid at once
    moving          work for the disk that has begun and not been reported: it has slots of its own (see `Move`)
    users, claims   rows that hold it; conversations that reference it
    pins            of these conversations, the pinned ones: it is evicted last, unless all are beyond their quotas
    over_quota      of these conversations, those beyond their owners' quotas
    past_window     it belongs to a context that has outgrown its window: without this chunk all of that context is
                    computed anew
    queue_place     0, or the place in the queue of the request that waits for it: it is evicted behind the chunks that
                    no request waits for, the queue's tail first
    copied_for_disk its copy on HOST is on its way to DISK and no reason to take its GPU slot: the first chunks written
                    are worth most
    loading         its swap-in is reserved but not all issued: the GPU slot holds nothing yet
    victim_set      the set of victims it is in; victim_group: its part of that set
    refused_by_host HOST has no room for a chunk of so low a value, or the copy there failed: the chunk is not copied
                    when its GPU slot is needed
    created, dropped_at
                    when it was made, and when it was last dropped
    """

    __slots__ = (
        "claims",
        "copied_for_disk",
        "created",
        "disk",
        "dropped_at",
        "end",
        "gpu",
        "host",
        "key",
        "last_active",
        "loading",
        "moving",
        "over_quota",
        "past_window",
        "pins",
        "queue_place",
        "refused_by_host",
        "tokens",
        "users",
        "victim_group",
        "victim_set",
    )

    def __init__(self, end: int, gpu: int, now: float):
        self.key: ChunkKey | None = None
        self.end = end
        self.tokens = 0
        self.gpu = gpu
        self.host = NO_SLOT
        self.disk = NO_SLOT
        self.users = 0
        self.claims = 0
        self.pins = 0
        self.over_quota = 0
        self.past_window = False
        self.queue_place = 0
        self.created = self.last_active = now
        self.dropped_at = NEVER
        self.loading = False
        self.copied_for_disk = False
        self.refused_by_host = False
        self.moving: Move | None = None
        self.victim_set: ChunkSet | None = None
        self.victim_group: Group | None = None

    @property
    def resident(self) -> bool:
        return self.gpu != NO_SLOT or self.host != NO_SLOT or self.disk != NO_SLOT

    def __repr__(self) -> str:
        name = self.key.hex()[:8] if self.key else "private"
        slots = f"gpu={self.gpu} host={self.host} disk={self.disk}"
        return f"Chunk({name} to {self.end}, {slots} users={self.users} claims={self.claims})"
