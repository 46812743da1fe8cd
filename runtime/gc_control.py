"""Looks for cyclic garbage when the loop has time, instead of when Python's own collector does.

That one comes in the middle of steps: every ten seconds or so for some milliseconds, and, as the tiers fill, every few
minutes for a tenth of a second and more, for which every stream stands still. The loop's own objects form no cycles;
errors and libraries make some. So it is enough to look at new objects while the device computes, and at all of them
when nobody waits.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType

DUE = 1_000  # objects made, less those freed, since the last look: from here on another one is due
SPARE_SECONDS = 2e-6  # an object; a look takes about a microsecond for each, half of them not in the cache
TOO_MANY = 5_000  # then they are looked at though there is no time: some 6 ms
ALL_SECONDS = 3600.0  # between looks at all objects, on a server that is never idle


class GarbageCollector:
    """Python's own is off inside of `with`, in the whole process; one thread calls this, and one at a time is open."""

    def __enter__(self) -> GarbageCollector:
        gc.collect()
        gc.freeze()  # what is here stays, the engine above all: nobody need look at it again
        self._before = gc.isenabled()
        gc.disable()
        self._all = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            gc.enable()
        gc.unfreeze()

    def due(self, spare: float) -> bool:
        """Whether to call `collect_new` now: the next step need not be planned for `spare` seconds."""
        new = gc.get_count()[0]
        return new >= DUE and (spare >= new * SPARE_SECONDS or new >= TOO_MANY)

    def collect_new(self) -> None:
        """Looks at the objects made since the last time; once in a long while at all of them."""
        if time.monotonic() - self._all > ALL_SECONDS:
            self._collect_all()
        else:
            gc.collect(0)

    def collect_idle(self) -> None:
        """Nobody waits: looks at all objects, for up to a few tenths of a second, if many are new."""
        if gc.get_count()[0] >= DUE or gc.get_count()[1]:
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self._all = time.monotonic()
