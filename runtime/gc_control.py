"""Collects cyclic garbage when the loop has time, instead of when Python's own collector decides
to.

Python's collector runs in the middle of steps: about every ten seconds for some milliseconds, and,
as the tiers fill, every few minutes for a tenth of a second and more, during which every stream
pauses. The loop's own objects form no cycles; errors and libraries make some. So it is enough to
examine new objects while the device computes, and all objects while no request waits.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType

# objects created minus objects freed since the last collection, from which on a new one is due
DUE = 1_000
# seconds per object; a collection takes about a microsecond for each, half of them not in the cache
SPARE_SECONDS = 2e-6
TOO_MANY = 5_000  # objects that are examined even without spare time: some 6 ms
ALL_SECONDS = 3600.0  # between full collections, on a server that is never idle


class GarbageCollector:
    """Switches Python's own collector off inside `with`, in the whole process. One thread calls
    this; only one may be open."""

    def __enter__(self) -> GarbageCollector:
        gc.collect()
        gc.freeze()  # objects that exist now stay, above all the engine: they are never examined
        self._before = gc.isenabled()
        gc.disable()
        self._all = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            gc.enable()
        gc.unfreeze()

    def due(self, spare: float) -> bool:
        """True if `collect_new` should be called now. `spare`: seconds until the next step must be
        planned."""
        new = gc.get_count()[0]
        return new >= DUE and (spare >= new * SPARE_SECONDS or new >= TOO_MANY)

    def collect_new(self) -> None:
        """Examines the objects created since the last call, and once in ALL_SECONDS all objects."""
        if time.monotonic() - self._all > ALL_SECONDS:
            self._collect_all()
        else:
            gc.collect(0)

    def collect_idle(self) -> None:
        """Examines all objects if many are new; takes up to a few tenths of a second. Called when
        no request waits."""
        if gc.get_count()[0] >= DUE or gc.get_count()[1]:
            self._collect_all()

    def _collect_all(self) -> None:
        gc.collect()
        self._all = time.monotonic()
