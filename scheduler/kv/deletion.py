"""Deletions: a deleted conversation's chunks leave every tier; the client is answered when the
records are erased."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..types import ChunkKey
from ..work import Backlog, Pieces
from .chunk_store import ChunkStore


class Deletion(NamedTuple):
    """`before`, `after`: the values of `DiskTier.deleted` before the deletion began, and after all
    of its keys were looked up."""

    before: int
    after: int


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
        return bool(
            self._backlog
            or (self._erasing and self._erasing[-1].after > self._store.disk.erased_up_to)
        )

    def begin(self, work: Pieces) -> None:
        """Begins a deletion. `work` drops its chunks."""
        self._backlog.begin(self._deletion(work))

    def begin_unanswered(self, work: Pieces) -> None:
        """Begins a deletion for which no client waits: the conversation's time is over."""
        self._backlog.begin(work)

    def _deletion(self, work: Pieces) -> Pieces:
        before = self._store.disk.deleted
        yield from work
        self._erasing.append(Deletion(before, self._store.disk.deleted))

    def drop(self, keys: Iterable[ChunkKey], units: int = 1) -> Pieces:
        """Drops the chunks of these keys that no conversation claims and no row uses. `units`: of
        one; 2 if the key is made first."""
        for key in keys:
            self._store.delete(key)
            yield units

    def take_ended(self) -> list[bool]:
        """Returns, for each deletion that has ended since the last call, whether all of its records
        are erased. False: the disk refused to erase one, so a record may remain."""
        disk = self._store.disk
        ended = []
        while self._erasing and self._erasing[0].after <= disk.erased_up_to:
            ended.append(not disk.refused(*self._erasing.popleft()))
        return ended
