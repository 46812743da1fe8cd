"""A chunk store that notes which chunks may have entered, left or changed their fastest tier. KV
events are made of these notes; without events, `ChunkStore` alone is used, at no cost."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..config import SchedulerConfig
from ..types import GPU, TIERS, ChunkKey
from .chunk import NO_SLOT, Chunk
from .chunk_store import ChunkStore
from .retention import EvictionPolicy


class ContextRun(NamedTuple):
    """Consecutive chunks of one context, which starts at position 0, with their tokens.

    previous    key of the chunk before them; NO_KEY: they are the first ones
    keys        of these chunks
    tokens      theirs, perhaps with more behind them
    salt        of their request
    """

    previous: ChunkKey
    keys: Sequence[ChunkKey]
    tokens: array[int]
    salt: bytes


class ResidencyChanges(NamedTuple):
    """tiers    by chunk: the fastest tier in which it is now, or NO_SLOT if it is in none
    names       all chunks that got their keys, and the prompts of requests that joined: the chunks
                in lower tiers that an earlier process left have no other names
    """

    tiers: Sequence[tuple[ChunkKey, int]]
    names: Sequence[ContextRun] = ()


class NotedChunkStore(ChunkStore):
    """Notes every chunk whose slots may have changed.

    names   filled by those who know a chunk's tokens
    """

    def __init__(self, config: SchedulerConfig, policy: EvictionPolicy):
        super().__init__(config, policy)
        self.names: list[ContextRun] = []
        self._noted: dict[Chunk, None] = {}

    def take_changes(self) -> ResidencyChanges | None:
        """Returns what has changed since the last call, or None."""
        if not (self._noted or self.names):
            return None
        tiers = []
        for noted in self._noted:
            key = noted.key
            if key is None:
                continue
            chunk = self.find(key)
            tier = NO_SLOT if chunk is None else fastest_tier(chunk)
            if chunk is None:
                if noted.noted_tier != NO_SLOT:
                    tiers.append((key, NO_SLOT))
            elif chunk.noted_tier != tier:
                chunk.noted_tier = tier
                tiers.append((key, tier))
        names = self.names[:]
        self._noted.clear()
        self.names.clear()
        return ResidencyChanges(tiers, names) if tiers or names else None

    # -- changes of slots. All others end in `update_victim_set`.

    def update_victim_set(self, chunk: Chunk) -> None:
        super().update_victim_set(chunk)
        if chunk.noted_tier != GPU or chunk.slots[GPU] == NO_SLOT:
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


def fastest_tier(chunk: Chunk) -> int:
    """NO_SLOT: the chunk is in no tier."""
    for tier in TIERS:
        if chunk.slots[tier] != NO_SLOT:
            return int(tier)
    return NO_SLOT


def resident_chunks(store: ChunkStore) -> ResidencyChanges:
    """All keyed chunks that are in a tier."""
    chunks = ((chunk.key, fastest_tier(chunk)) for chunk in store.resident_chunks())
    return ResidencyChanges(
        [(key, tier) for key, tier in chunks if key is not None and tier != NO_SLOT]
    )
