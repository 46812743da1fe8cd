"""Deletions: a deleted conversation's chunks leave every tier; the client is answered when the records are erased."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from ..types import ChunkKey
from .chunk_store import ChunkStore

KEYS_A_STEP = 1000  # keys looked up in one plan: a millisecond or two


class Deletion(NamedTuple):
    """`keys`: of the chunks still to be looked up; `before`: the value of `DiskTier.deleted` before the deletion
    began."""

    keys: Iterator[ChunkKey]
    before: int


class Deletions:
    """Deletions in progress, in the order in which they began; they end in the same order."""

    def __init__(self, store: ChunkStore):
        self._store = store
        self._looking: deque[Deletion] = deque()
        # with the value of `DiskTier.deleted` at the end of its lookups
        self._erasing: deque[tuple[Deletion, int]] = deque()

    @property
    def looking(self) -> bool:
        """True if keys are still to be looked up: plans are needed even without other work."""
        return bool(self._looking)

    @property
    def busy(self) -> bool:
        """True if anything is still to be erased."""
        return bool(self._looking or (self._erasing and self._erasing[-1][1] > self._store.disk.erased_up_to))

    def begin(self, keys: Iterable[ChunkKey], before: int) -> None:
        """Drops the chunks of these keys that no conversation claims and no row uses. Many keys are spread over several
        plans. `before`: the value of `DiskTier.deleted` when the deletion began."""
        self._looking.append(Deletion(iter(keys), before))
        self.go_on()

    def go_on(self) -> None:
        """Does one step's share."""
        left = KEYS_A_STEP
        while self._looking and left:
            keys = list(islice(self._looking[0].keys, left))
            left -= len(keys)
            for key in keys:
                self._store.delete(key)
            if left:
                self._erasing.append((self._looking.popleft(), self._store.disk.deleted))

    def take_ended(self) -> list[bool]:
        """Returns, for each deletion that has ended since the last call, whether all of its records are erased. False:
        the disk refused to erase one, so a record may remain."""
        disk, ended = self._store.disk, []
        while self._erasing and self._erasing[0][1] <= disk.erased_up_to:
            deletion, last = self._erasing.popleft()
            ended.append(not disk.refused(deletion.before, last))
        return ended
