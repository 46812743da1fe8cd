"""Looks for cyclic garbage when the loop has time, instead of when Python's own collector does.

That one comes in the middle of steps: for milliseconds every few seconds, and, as the tiers fill, for a tenth of a
second and more every few minutes, for which every stream stands still. The loop's own objects form no cycles; errors
and libraries make some. So it is enough to look at what is new while the device computes, and at all when nobody waits.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType

NEW = 1_000  # objects since the last look, from which on another one is due: it takes about a third of a millisecond
TOO_MANY = 30_000  # then it comes though there is no time
SECONDS = 2e-3  # of the device's work still to come that are enough for it
FULL_SECONDS = 3600.0  # between looks at all, on a server that is never idle


class GarbageCollector:
    """Python's own is off inside of `with`, in which one thread calls this."""

    def __enter__(self) -> GarbageCollector:
        gc.collect()
        gc.freeze()  # what is here stays, the engine above all: nobody need look at it again
        gc.disable()
        self._full = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
        gc.unfreeze()

    def collect_new(self, spare: float) -> bool:
        """Between steps; the device is busy for `spare` more seconds. Whether it took any time."""
        new = gc.get_count()[0]
        if new < NEW or (spare < SECONDS and new < TOO_MANY):
            return False
        if time.monotonic() - self._full > FULL_SECONDS:
            self.collect_all()
        else:
            gc.collect(1)
        return True

    def collect_all(self) -> None:
        """Nobody waits. Up to a few tenths of a second."""
        gc.collect()
        self._full = time.monotonic()
