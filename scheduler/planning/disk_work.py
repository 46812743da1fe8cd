"""All work for the disk beside the steps: records of an earlier process, prefetching, saving, erasing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.deletion import Deletions
from ..types import ChunkKey, DiskRecord
from .plan_builder import PlanBuilder
from .prefetch import Prefetcher
from .write_behind import WriteBehind


class DiskWork:
    def __init__(
        self,
        store: ChunkStore,
        chunk_keys: ChunkKeys,
        deletions: Deletions,
        prefetcher: Prefetcher,
        write_behind: WriteBehind,
    ):
        self._store, self._chunk_keys, self._deletions = store, chunk_keys, deletions
        self._prefetcher, self._write_behind = prefetcher, write_behind

    def adopt(self, records: Iterable[DiskRecord], now: float) -> None:
        """Makes chunks of the records that an earlier process left, for lookups to find; before the first request.

        Raises InvariantError for a slot that does not exist or has two records.
        """
        self._store.adopt(records, now)

    def keys(self, tokens: array[int], salt: bytes, shared: int = 0) -> Iterator[ChunkKey]:
        """The keys of a log's full chunks, wherever its contexts may have begun, without those within its first
        `shared` tokens. Their number grows with the square of the log's length: they are made one by one."""
        return self._chunk_keys.all(tokens, salt, shared)

    def erase(self, keys: Iterable[ChunkKey]) -> None:
        """As `Conversations.delete`, of a conversation that has not been active since the start: drops those chunks; of
        a long log in the next few plans."""
        self._deletions.begin(keys, self._store.disk.refused)

    def take_erased(self) -> list[bool]:
        """For each `Conversations.delete` and `erase` that has ended since the last call, in their order: whether all
        records that were the conversation's own are erased on all ranks. False: the disk refused."""
        return self._deletions.take_ended()

    @property
    def saving(self) -> bool:
        """Chunks are on their way to DISK, or records are still to be erased. A process that must not lose KV, nor
        leave deleted KV behind, goes on with plans and results until this is False."""
        return self._write_behind.saving or self._deletions.busy

    @property
    def busy(self) -> bool:
        """Work is under way, or a plan is to begin some."""
        return self._store.disk.outstanding or self._write_behind.busy or self._prefetcher.busy

    def plan(self, batch: PlanBuilder) -> None:
        """Adds the disk's work that begins with this plan and runs beside its step."""
        self._prefetcher.plan(batch.evictor, batch.now)
        self._write_behind.plan(batch.evictor, batch.now)
        batch.spills, batch.promotions, batch.erased = self._store.disk.hand_over(batch.step)
