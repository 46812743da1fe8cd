"""Deletions: a deleted conversation's chunks leave every tier; the client is answered when the
records are erased."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..types import SHARED, ChunkKey, Erasure
from ..work import Backlog, Pieces
from .chunk_keys import NO_KEY
from .chunk_store import ChunkStore


class Deletion(NamedTuple):
    """`before`, `after`: by lower tier, `deleted` before the deletion began, and after all of its
    keys were looked up."""

    before: list[int]
    after: list[int]


class Deletions:
    """Deletions in progress, in the order in which they began; they end in the same order. Each is
    work for `backlog`, so a plan does a part of a long one."""

    def __init__(self, store: ChunkStore, backlog: Backlog):
        self._store = store
        self._backlog = backlog
        self._erasing: deque[Deletion] = deque()

    @property
    def busy(self) -> bool:
        """True if anything is still to be dropped or erased."""
        return bool(self._backlog or (self._erasing and not self._has_ended(self._erasing[-1])))

    def begin(self, work: Pieces) -> None:
        """Begins a deletion. `work` drops its chunks."""
        self._backlog.begin(self._deletion(work))

    def begin_unanswered(self, work: Pieces) -> None:
        """Begins a deletion for which no client waits: the conversation's time is over."""
        self._backlog.begin(self._unanswered(work))

    def _unanswered(self, work: Pieces) -> Pieces:
        yield from work
        self._store.note_deletion()

    def _deletion(self, work: Pieces) -> Pieces:
        before = [lower.deleted for lower in self._store.lower]
        yield from work
        after = [lower.deleted for lower in self._store.lower]
        self._erasing.append(Deletion(before, after))

    def drop(self, keys: Iterable[ChunkKey], units: int = 1) -> Pieces:
        """Drops the chunks of these keys that no conversation claims and no row uses. `units`: of
        one; 2 if the key is made first. Those that are NO_KEY belong to others and stay."""
        for key in keys:
            if key != NO_KEY:
                self._store.delete(key)
            yield units

    def take_ended(self) -> list[Erasure]:
        """Returns, for each deletion that has ended since the last call, how it did."""
        ended = []
        while self._erasing and self._has_ended(self._erasing[0]):
            numbers = zip(self._store.lower, *self._erasing.popleft(), strict=True)
            # each tier is asked: it then forgets what it has told
            tiers = [lower.tier for lower, *which in numbers if lower.refused(*which)]
            ended.append(
                Erasure.WHOLLY
                if not tiers
                else Erasure.LATER
                if tiers == [SHARED]
                else Erasure.REFUSED
            )
        return ended

    def _has_ended(self, deletion: Deletion) -> bool:
        numbers = zip(self._store.lower, deletion.after, strict=True)
        return all(after <= lower.erased_up_to for lower, after in numbers)
