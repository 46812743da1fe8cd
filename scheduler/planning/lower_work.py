"""All work of the tiers below HOST: records of an earlier process, prefetching, spills, erasing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from ..kv.adoption import adopt
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.deletion import Deletions
from ..kv.states import KeptStates
from ..types import ChunkKey, Erasure, StoredRecord, Tier
from .plan_builder import PlanBuilder
from .prefetch import Prefetcher
from .sharing import Sharing
from .write_behind import WriteBehind


class LowerTierWork:
    """The scheduler's side of the tiers below HOST: records of an earlier process, writes,
    deletions and each plan's work."""

    def __init__(
        self,
        store: ChunkStore,
        kept: KeptStates | None,
        chunk_keys: ChunkKeys,
        deletions: Deletions,
        prefetcher: Prefetcher,
        write_behind: WriteBehind,
        sharing: Sharing | None,
    ):
        self._store = store
        self._kept = kept
        self._chunk_keys = chunk_keys
        self._deletions = deletions
        self._prefetcher = prefetcher
        self._write_behind = write_behind
        self._sharing = sharing

    def adopt(self, records: Mapping[Tier, Iterable[StoredRecord]], now: float) -> None:
        """Makes chunks and states of the records that an earlier process left in lower tiers, so
        that lookups find them. Called before the first request.

        Raises InvariantError for a slot that does not exist or has two records.
        """
        for lower in self._store.lower:
            left = records.get(lower.tier, ())
            adopt(self._store, self._kept, lower, left, now)

    def keys(self, tokens: array[int], salt: bytes, shared: int = 0) -> Iterator[ChunkKey]:
        """Yields the keys of a log's full chunks for every possible context start, and NO_KEY for
        those in its first `shared` tokens. Their number grows with the square of the log's length,
        so they are made one by one."""
        return self._chunk_keys.all(tokens, salt, shared)

    def erase(self, keys: Iterable[ChunkKey]) -> None:
        """Deletes like `Conversations.delete`, for a conversation that has not been active since
        the start: drops the chunks of these keys, which are made one by one. A long log takes
        several plans."""
        self._deletions.begin(self._deletions.drop(keys, units=2))

    def take_erased(self) -> list[Erasure]:
        """Returns, for each `Conversations.delete` and `erase` that has ended since the last call,
        in their order, whether the conversation's own records are erased on all ranks."""
        return self._deletions.take_ended()

    @property
    def unfinished(self) -> bool:
        """True while chunks are on their way to a lower tier or records are to be erased. A process
        that must not lose KV, or must not leave deleted KV behind, continues with plans and results
        until this is False."""
        sharing = self._sharing is not None and self._sharing.writing
        return self._write_behind.spilling or self._deletions.busy or sharing

    @property
    def busy(self) -> bool:
        """True if such work is in progress, or a plan is needed to begin some."""
        outstanding = any(lower.outstanding for lower in self._store.lower)
        sharing = self._sharing is not None and self._sharing.busy
        return outstanding or self._write_behind.busy or self._prefetcher.busy or sharing

    def plan(self, builder: PlanBuilder) -> None:
        """Adds the work that begins with this plan and runs beside its step."""
        self._prefetcher.plan(builder.evictor, builder.now)
        self._write_behind.plan(builder.evictor, builder.now)
        if self._sharing is not None:
            self._sharing.plan(builder)
        work = (lower.hand_over(builder.step) for lower in self._store.lower)
        builder.lower = tuple(part for part in work if part is not None)
