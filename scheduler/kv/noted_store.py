"""A chunk store that notes which chunks may have entered, left or changed their fastest tier. KV
events are made of these notes; without events, `ChunkStore` alone is used, at no cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..config import SchedulerConfig
from ..types import GPU, SHARED, ChunkKey, Tokens
from .chunk import NO_SLOT, Chunk
from .chunk_store import ChunkStore
from .context import KeyedContext
from .retention import EvictionPolicy


class ContextRun(NamedTuple):
    """Consecutive chunks of one context with their tokens: those from number `first` up to, not
    including, number `end`.

    keys        of the whole context, as in `ChunkKeys`; it may get more, but these stay
    tokens      of the whole context, likewise
    salt        of the request
    """

    first: int
    end: int
    keys: Sequence[ChunkKey]
    tokens: Tokens
    salt: bytes


class ResidencyChanges(NamedTuple):
    """tiers    by chunk: the fastest tier in which it is now, or NO_SLOT if it is in none
    names       all chunks that got their keys, and the prompts of requests that joined: the chunks
                in lower tiers that an earlier process left have no other names
    deleted     the time of a conversation is over, and its chunks are among those that are gone
    states      by chunk: after how many tokens the recurrent state is that is found by its key, or
                0 if none is any more
    """

    tiers: Sequence[tuple[ChunkKey, int]]
    names: Sequence[ContextRun] = ()
    deleted: bool = False
    states: Sequence[tuple[ChunkKey, int]] = ()


class NotedChunkStore(ChunkStore):
    """Notes every chunk whose slots may have changed, and the tokens of chunks in use."""

    def __init__(self, config: SchedulerConfig, policy: EvictionPolicy):
        super().__init__(config, policy)
        self._names: list[ContextRun] = []
        self._noted: dict[Chunk, None] = {}
        self._deleted = False
        self._states: dict[ChunkKey, int] = {}  # all that are found, and their ends
        self._noted_states: dict[ChunkKey, None] = {}

    def take_changes(self) -> ResidencyChanges | None:
        """Returns what has changed since the last call, or None."""
        if not (self._noted or self._names or self._deleted or self._noted_states):
            return None
        tiers = []
        for chunk in self._noted:
            key = chunk.key
            if key is None or chunk.state is not None:
                continue
            tier = GPU if chunk.slots[GPU] != NO_SLOT else fastest_tier(chunk)
            if chunk.noted_tier == tier:
                continue
            chunk.noted_tier = tier
            # a forgotten chunk says nothing if another one of its key is in a tier by now
            now = self.find(key) or chunk
            if tier != NO_SLOT or now is chunk or fastest_tier(now) == NO_SLOT:
                tiers.append((key, tier))
        states = [(key, self._states.get(key, 0)) for key in self._noted_states]
        changes = ResidencyChanges(tiers, self._names, self._deleted, states)
        self._noted.clear()
        self._noted_states.clear()
        self._names = []
        self._deleted = False
        return changes if any(changes) else None

    def resident(self) -> ResidencyChanges:
        """Returns all keyed chunks and states as if they had changed. Cost: all chunks."""
        chunks = (chunk for chunk in self.resident_chunks() if chunk.state is None)
        tiers = ((chunk.key, fastest_tier(chunk)) for chunk in chunks)
        return ResidencyChanges(
            [(key, tier) for key, tier in tiers if key is not None and tier != NO_SLOT],
            states=[*self._states.items()],
        )

    def note_context(self, context: KeyedContext, first: int, end: int) -> None:
        run = ContextRun(first, end, context.keys, context.tokens, context.request.salt)
        self._names.append(run)

    def note_state(self, key: ChunkKey, end: int) -> None:
        self._noted_states[key] = None
        if end:
            self._states[key] = end
        else:
            self._states.pop(key, None)  # it may never have been told

    def note_deletion(self) -> None:
        self._deleted = True

    # -- changes of slots. All others end in `update_victim_set`.

    def update_victim_set(self, chunk: Chunk) -> None:
        super().update_victim_set(chunk)
        if chunk.slots[GPU] == NO_SLOT:  # else it came there by `publish` or `reserve_swap_ins`
            self._noted[chunk] = None

    def publish(self, chunk: Chunk, key: ChunkKey) -> Chunk:
        owner = super().publish(chunk, key)
        self._noted[owner] = None
        return owner

    def reclaim_gpu(self, victims: Sequence[Chunk]) -> int:
        self._noted.update(dict.fromkeys(victims))
        return super().reclaim_gpu(victims)

    def drop_from_host(self, victims: Sequence[Chunk]) -> None:
        self._noted.update(dict.fromkeys(victims))
        super().drop_from_host(victims)

    def reserve_swap_ins(self, chunks: Iterable[Chunk]) -> None:
        chunks = list(chunks)
        self._noted.update(dict.fromkeys(chunks))
        super().reserve_swap_ins(chunks)

    def cancel_swap_ins(self, chunks: Iterable[Chunk]) -> None:
        chunks = list(chunks)
        self._noted.update(dict.fromkeys(chunks))
        super().cancel_swap_ins(chunks)


class NotedStores:
    """Makes a scheduler's store, and gives it to those who read its notes."""

    store: NotedChunkStore

    def __call__(self, config: SchedulerConfig, policy: EvictionPolicy) -> NotedChunkStore:
        self.store = NotedChunkStore(config, policy)
        return self.store


def fastest_tier(chunk: Chunk) -> int:
    """NO_SLOT: the chunk is in no tier of this machine. Other machines tell their own."""
    for tier, slot in enumerate(chunk.slots[:SHARED]):
        if slot != NO_SLOT:
            return tier
    return NO_SLOT
