"""When time alone makes something happen to a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

SPARE = 64  # entries that are not worth tidying up


class Timers:
    """One time for each name that has one.

    A heap, in which a name that was given another time, or none, leaves its entry behind; when most entries are of that
    kind they go, so clients that name times far off and never come back do not fill it.
    """

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, those left behind included."""
        return len(self._heap)

    @property
    def next(self) -> float:
        """No time is earlier; infinity if there is none."""
        return self._heap[0][0] if self._heap else inf

    def time(self, name: str) -> float:
        """Infinity if it has none."""
        return self._times.get(name, inf)

    def set(self, name: str, time: float) -> None:
        """Instead of the time it had. Infinity: none."""
        self._times.pop(name, None)
        if time < inf:
            self._times[name] = time
            heappush(self._heap, (time, name))
        if len(self._heap) > 2 * len(self._times) + SPARE:
            self._heap = [(at, other) for other, at in self._times.items()]
            heapify(self._heap)

    def take(self, now: float) -> Iterator[str]:
        """Names whose time has come, which have none from then on, by time; `set` may be called meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            time, name = heappop(self._heap)
            if self._times.get(name) == time:
                del self._times[name]
                yield name
