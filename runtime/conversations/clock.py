"""The time that histories are stored with, and the time by which they expire.

Both are the wall clock's, of PostgreSQL the database's. A wall clock may jump: a wrong time is set,
or a machine starts with one and is corrected. A jump ahead would delete all histories. So the wall
clock is compared with CLOCK_BOOTTIME. No program can set that clock, and it counts while the
machine sleeps. After a jump expiry is suspended until the new time has lasted a day; meanwhile
conversations are as old as without the jump. What is stored meanwhile has the later of both times,
so that it is never too old, whichever of them is right.

One case remains: a machine starts with a clock that is behind, and is corrected later. What was
stored before the correction seems old, and may expire a day after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

JUMP_SECONDS = 3600.0  # a smaller change is a clock that is set right, or drifts
LASTING_SECONDS = 86400.0
JUMPED = (
    "the clock of the histories (%s) has jumped by %+.0f s: no conversation expires until the "
    "clock is right again, "
    "or has kept its new time for a day; if the new time is wrong, set the clock; if it is right, "
    "a restart accepts it"
)


def boot_time() -> float:
    """Seconds since the machine's start, also while it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HistoryClock:
    """`whose`: the clock's name for users. `wall`, `boot`: they return seconds. The time at the
    first look is right: a process may start after any time."""

    def __init__(
        self, whose: str, wall: Callable[[], float], boot: Callable[[], float] = boot_time
    ):
        self._whose = whose
        self._wall = wall
        self._boot = boot
        self._right = wall() - boot()  # wall time minus boot time
        self._jumped = self._right  # after a jump: the same difference now
        self._one_looks = threading.Lock()  # the database's thread looks too
        # boot time; None: there was no jump, or its time is right
        self._jumped_at: float | None = None

    def now(self) -> float:
        """Wall time, seconds since the epoch; after a jump back the time without the jump."""
        with self._one_looks:
            wall = self._wall()
            boot = self._boot()
            self._compare(wall - boot, boot)
            return max(wall, boot + self._right) if self.suspended else wall

    def without_jump(self, now: float) -> float:
        """Returns `now`, a time of `now()`, without a jump ahead that is not accepted, or that was
        put right since."""
        return min(now, self._boot() + self._right)

    @property
    def suspended(self) -> bool:
        """True if the clock has jumped, and nothing may be deleted because of its time."""
        return self._jumped_at is not None

    def _compare(self, difference: float, boot: float) -> None:
        if abs(difference - self._right) <= JUMP_SECONDS:
            if self.suspended:
                log.warning(
                    "the clock of the histories (%s) is right again: conversations expire",
                    self._whose,
                )
            self._right = difference
            self._jumped_at = None
            return
        if self._jumped_at is None or abs(difference - self._jumped) > JUMP_SECONDS:
            log.warning(JUMPED, self._whose, difference - self._right)
            self._jumped_at = boot
        self._jumped = difference
        if boot - self._jumped_at >= LASTING_SECONDS:
            log.warning(
                "the clock of the histories (%s) has kept its new time: conversations expire",
                self._whose,
            )
            self._right = difference
            self._jumped_at = None
