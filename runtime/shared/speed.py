"""What a shared store is believed to do in a second."""

from __future__ import annotations

WEIGHT = 1 / 8  # of the latest busy period in the moving average of the speed


class Speed:
    """Bytes a second in one direction, or keys a second of one thread: all bytes by all seconds of
    busy periods, older ones with less and less weight. So a large transfer counts more than a small
    one, which is mostly latency."""

    def __init__(self, count: float, speed: float):
        self._since = 0.0
        self._moved = 0
        self.assume(count, speed)

    def assume(self, count: float, speed: float) -> None:
        self._count = float(count)
        self._seconds = count / speed

    def halve(self) -> None:
        self._seconds *= 2

    @property
    def value(self) -> float:
        return self._count / self._seconds

    def add(self, count: int, seconds: float) -> None:
        self._count += count - WEIGHT * self._count
        self._seconds += max(1e-6, seconds) - WEIGHT * self._seconds

    def begins(self, now: float) -> None:
        """A busy period begins."""
        self._since = now
        self._moved = 0

    def moved(self, count: int) -> None:
        self._moved += count

    def ends(self, now: float) -> None:
        if self._moved:
            self.add(self._moved, now - self._since)
