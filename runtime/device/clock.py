"""Converts the times of a device's events to the host's clock.

Events give only their distance from each other, in milliseconds of single precision, and the two
clocks drift. So each event's time is counted from a recent event. The offset between the clocks is
estimated anew every second from events that the host waited for: the host sees them slightly late,
never early, so the smallest lag is the best estimate.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any, Protocol

WINDOW_S = 1.0


class Event(Protocol):
    """Stands for `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both are complete. Negative if it came later."""


class DeviceClock:
    def __init__(self, event: Event):
        """`event` has just been waited for."""
        # seconds on the device since its first event
        self._anchor = event
        self._anchor_s = 0.0
        self._offset = time.perf_counter()
        self._least = inf
        self._learned = self._offset

    def seen(self, event: Event) -> None:
        """Records that the host, waiting for the event, has just seen it happen."""
        now = time.perf_counter()
        self._least = min(self._least, now - self._since_first(event))
        if now - self._learned > WINDOW_S:
            self._offset = self._least
            self._least = inf
            self._learned = now

    def read(self, event: Event) -> float:
        """The time of the complete event, seconds of `time.perf_counter`."""
        return self._since_first(event) + self._offset

    def _since_first(self, event: Event) -> float:
        seconds = self._anchor_s + self._anchor.elapsed_time(event) / 1e3
        if seconds > self._anchor_s + WINDOW_S:
            self._anchor = event
            self._anchor_s = seconds
        return seconds
