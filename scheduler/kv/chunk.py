"""One chunk of KV: its slots, its users and claims, and its last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from ..types import GPU, LABELS, TIERS, ChunkKey, QueuePlace, Tier

NO_SLOT = -1
NOWHERE = [NO_SLOT for _ in TIERS]
NEVER = -inf


class OrderedSet(OrderedDict["Chunk", None]):
    """A set in insertion order. Its first element is found and removed in constant time (with a
    plain dict it is not)."""

    def add(self, chunk: Chunk) -> None:
        self[chunk] = None

    def discard(self, chunk: Chunk) -> None:
        self.pop(chunk, None)


class ChunkSet(Protocol):
    """A set of chunks. A chunk is in at most one such set."""

    def add(self, chunk: Chunk) -> None: ...

    def discard(self, chunk: Chunk) -> None: ...


@dataclass(slots=True, eq=False)
class Move:
    """A spill to a tier below HOST or a promotion from it, in progress.

    chunk       None after it was dropped: then the move owns both slots
    key         `Chunk.erased_with`
    host, slot  in HOST and in that tier
    spills      otherwise it is a promotion
    late        its deadline is over, and no request waits for it
    """

    tier: Tier
    chunk: Chunk | None
    key: ChunkKey
    host: int
    slot: int
    spills: bool
    late: bool = False


class VictimGroup:
    """Chunks of one weight class and one stamp, such as those of one turn: their retention value
    is the same at any time (see `retention`)."""

    __slots__ = ("_last", "_sorted", "chunks", "number", "stamp")

    def __init__(self, number: int, stamp: float):
        self.number = number
        self.stamp = stamp
        self.chunks: dict[Chunk, None] = {}
        self._sorted, self._last = True, 0

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk] = None
        if chunk.end < self._last:
            self._sorted = False  # chunks mostly arrive in order of position
        self._last = chunk.end

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks in the order of position."""
        self.chunks.update(dict.fromkeys(chunks))
        if chunks[0].end < self._last:
            self._sorted = False
        self._last = chunks[-1].end

    def leading(self, most: int) -> list[Chunk]:
        """The first `most` chunks by position."""
        if not self._sorted:
            self.chunks = dict.fromkeys(sorted(self.chunks, key=attrgetter("end")))
            self._sorted = True
            self._last = next(reversed(self.chunks)).end
        return list(islice(self.chunks, most))


class State:
    """The recurrent states of all layers after the first `end` tokens of a context. It is never
    written again.

    key       of the chunk that ends there; None: the state is private, or not named yet
    keys      the turn's keys, if the state gets its key when the tokens before it are applied
    slot      the state slot that it holds until it is copied out; NO_SLOT: none
    pieces    its copies on HOST and below, all or none; they live and die together
    modest    it is kept only if no KV must be dropped from HOST for it
    replaces  an earlier state of the same reply, dropped when this one is copied out
    pinned    its conversation is pinned: it is evicted last
    unwanted  it is dropped when the next plan begins, or later if a row is to swap it in
    """

    __slots__ = ("end", "key", "keys", "modest", "pieces", "pinned", "replaces", "slot", "unwanted")

    def __init__(
        self,
        end: int,
        slot: int,
        key: ChunkKey | None = None,
        keys: list[ChunkKey] | None = None,
        modest: bool = False,
    ):
        self.end = end
        self.key = key
        self.keys = keys
        self.slot = slot
        self.modest = modest
        self.pieces: list[Chunk] = []
        self.replaces: State | None = None
        self.pinned = False
        self.unwanted = False


class Claims(NamedTuple):
    """Counts of the conversations that claim one chunk: all, the pinned ones, and those over their
    owners' quotas."""

    claims: int
    pins: int = 0
    over_quota: int = 0


class Chunk:
    """end          position after its last token when full
    tokens          leading tokens whose KV is valid: all of a keyed chunk, fewer in a tail
    slots           by tier: its slot there, or NO_SLOT; several may be valid at once
    moving          its spill or promotion in progress, not reported yet, which has a slot of its
                    own (see `Move`)
    users, claims   rows that hold the chunk; conversations that claim it
    pins            pinned conversations among the claims: the chunk is evicted last, unless all of
                    the claims are over quota
    over_quota      conversations over their owners' quotas among the claims
    past_window     the chunk's context has outgrown its window: if this chunk is lost, the whole
                    context is recomputed
    queue_places    places of the requests in the queue that wait for the chunk, ascending. It is
                    evicted after unpinned chunks that no request waits for; among such chunks,
                    those of the last request go first
    staged          its copy on HOST is only on its way to a lower tier, so its GPU slot is not
                    taken for that copy: chunks of turns that have just ended are the most valuable
    awaits_swap_in  its GPU slot is reserved, but the swap-in is not issued for all of the row: the
                    slot holds no data yet
    victim_set      the set of victims that contains it; victim_group: its group in that set
    refused_by_host HOST has no room for a chunk of so low a value, or the copy there failed: the
                    chunk is not copied when its GPU slot is needed
    created, dropped_at
                    times at which it was made and last dropped
    noted_tier      the fastest tier in which `NotedChunkStore.take_changes` last saw it, or NO_SLOT
    state           it is a piece of this state, not KV, and never on the GPU
    """

    __slots__ = (
        "awaits_swap_in",
        "claims",
        "created",
        "dropped_at",
        "end",
        "key",
        "last_active",
        "moving",
        "noted_tier",
        "over_quota",
        "past_window",
        "pins",
        "queue_places",
        "refused_by_host",
        "slots",
        "staged",
        "state",
        "tokens",
        "users",
        "victim_group",
        "victim_set",
    )

    def __init__(self, end: int, gpu: int, now: float):
        self.key: ChunkKey | None = None
        self.end = end
        self.tokens = 0
        self.slots = NOWHERE.copy()
        self.slots[GPU] = gpu
        self.users = 0
        self.claims = 0
        self.pins = 0
        self.over_quota = 0
        self.past_window = False
        self.queue_places: list[QueuePlace] = []
        self.created = self.last_active = now
        self.dropped_at = NEVER
        self.noted_tier = NO_SLOT
        self.awaits_swap_in = False
        self.staged = False
        self.refused_by_host = False
        self.moving: Move | None = None
        self.victim_set: ChunkSet | None = None
        self.victim_group: VictimGroup | None = None
        self.state: State | None = None

    @property
    def erased_with(self) -> ChunkKey | None:
        """The key whose deletion erases its records: of a piece, that of its state."""
        return self.key if self.state is None else self.state.key

    @property
    def resident(self) -> bool:
        return self.slots != NOWHERE

    def __repr__(self) -> str:
        name = self.key.hex()[:8] if self.key else "private"
        slots = " ".join(f"{LABELS[tier]}={self.slots[tier]}" for tier in TIERS)
        return f"Chunk({name} to {self.end}, {slots} users={self.users} claims={self.claims})"
