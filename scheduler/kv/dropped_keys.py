"""The keys of chunks that have left the store, so that computing one again can be counted."""

from __future__ import annotations

from collections import deque

from ..types import ChunkKey
from .chunk import NEVER


class DroppedKeys:
    """The last `most` of these keys, with the time at which each one's chunk was dropped."""

    def __init__(self, most: int):
        self._most = most
        self._times: dict[ChunkKey, float] = {}
        self._in_order: deque[tuple[ChunkKey, float]] = deque()  # the same, the earliest first

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._times

    def add(self, key: ChunkKey, dropped_at: float) -> None:
        self._times[key] = dropped_at
        self._in_order.append((key, dropped_at))
        if len(self._in_order) > self._most:
            key, dropped_at = self._in_order.popleft()
            if self._times.get(key) == dropped_at:
                del self._times[key]

    def pop(self, key: ChunkKey) -> float:
        """Removes the key. Returns its time, or NEVER if the key is not there."""
        return self._times.pop(key, NEVER)
