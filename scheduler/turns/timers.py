"""Timers of conversations, by name."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

SPARE = 64  # outdated entries that are not worth a cleanup


class Timers:
    """At most one time for each name.

    A heap. A name whose time is changed or removed leaves its old entry behind. When most entries
    are outdated they are removed. So clients that set many far times and never return do not fill
    the heap.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    @property
    def next(self) -> float:
        """A lower bound of all times; infinity if there is none."""
        return self._heap[0][0] if self._heap else inf

    def time(self, name: str) -> float:
        """The name's time; infinity if it has none."""
        return self._times.get(name, inf)

    def set(self, name: str, time: float) -> None:
        """Replaces the name's time. Infinity: none."""
        self._times.pop(name, None)
        if time < inf:
            self._times[name] = time
            heappush(self._heap, (time, name))
        if len(self._heap) > 2 * len(self._times) + SPARE:
            self._heap = [(at, other) for other, at in self._times.items()]
            heapify(self._heap)

    def take(self, now: float) -> Iterator[str]:
        """Removes and yields the names whose time has come, in order of time. `set` may be called
        meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            time, name = heappop(self._heap)
            if self._times.get(name) == time:
                del self._times[name]
                yield name
