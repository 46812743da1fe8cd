"""Tells when the events of a device happened, on the host's clock.

Events know only how far apart they are, in milliseconds of single precision, and the two clocks drift. So each event's
time is counted from one that is not long past, and what lies between the clocks is learned again every second from the
work whose end the host was waiting for: it sees an end a little late, never early, so the least lag is the nearest.
"""

from __future__ import annotations

import time
from math import inf
from typing import Any, Protocol

WINDOW_S = 1.0


class Event(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both are complete. Negative if it came later."""


class DeviceClock:
    def __init__(self, event: Event):
        """`event` has just been waited for."""
        self._anchor, self._anchor_s = event, 0.0  # seconds of the device, since its first event
        self._offset = time.perf_counter()
        self._least, self._learned = inf, self._offset

    def seen(self, event: Event) -> None:
        """To be told when the host has just seen that the event, which it was waiting for, has happened."""
        now = time.perf_counter()
        self._least = min(self._least, now - self._since_first(event))
        if now - self._learned > WINDOW_S:
            self._offset, self._least, self._learned = self._least, inf, now

    def read(self, event: Event) -> float:
        """When the complete event happened, seconds of `time.perf_counter`."""
        return self._since_first(event) + self._offset

    def _since_first(self, event: Event) -> float:
        seconds = self._anchor_s + self._anchor.elapsed_time(event) / 1e3
        if seconds > self._anchor_s + WINDOW_S:
            self._anchor, self._anchor_s = event, seconds
        return seconds
