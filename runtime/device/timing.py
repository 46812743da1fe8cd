"""Times copies on their lanes, and the waits of steps for them, with events of the device. Nothing
here waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...scheduler.plan import Lane
from ..counters import NO_WAITS, Waits
from .clock import DeviceClock, Event
from .protocol import TransferSeconds, Work

MOST_PENDING = 256  # complete ones are added up at this number even without a `read`


class Wait(NamedTuple):
    """A step's layers from `layer` on begin after the event."""

    layer: int
    event: Event


class _Copy(NamedTuple):
    lane: Lane
    issued: Event
    start: Event
    end: Event
    size: int

    def complete(self) -> bool:
        """Checks both events: the idle stream may be late, because the driver lets streams share
        queues if there are many."""
        return self.end.query() and self.issued.query()


class _Step(NamedTuple):
    waits: list[Wait]
    start: Event
    end: Event
    size: int

    def complete(self) -> bool:
        return self.end.query()


class TransferTimes:
    """Called around the work that is put on the streams, in the order of issue, by the issuing
    thread."""

    def __init__(self, new_event: Callable[[], Event], streams: dict[Lane, Any], idle: Any):
        """idle: a stream that carries no other work: an event there happens as soon as it is
        recorded."""
        self._new_event = new_event
        self._streams = streams
        self._idle = idle
        self._seconds = dict.fromkeys((Lane.IN, Lane.OUT), 0.0)
        self._queued = {Lane.IN: NO_WAITS, Lane.OUT: NO_WAITS}
        self._exposed = 0.0
        self._pending: deque[_Copy | _Step] = deque()
        self._waits: list[Wait] = []
        self._start: Event | None = None
        self._layers = 1
        self._report: Callable[[Work], None] | None = None
        self._clock: DeviceClock | None = None

    def watch(self, report: Callable[[Work], None], synchronize: Callable[[Any], None]) -> None:
        """From now on `read` reports each copy and step, and steps that wait for nothing are timed
        too.

        synchronize: waits for an event.
        """
        event = self._record(Lane.COMPUTE)
        synchronize(event)
        self._clock = DeviceClock(event)
        self._report = report

    def seen(self, event: Event) -> None:
        """Records that the host, waiting for the event, has just seen it happen."""
        if self._clock is not None:
            self._clock.seen(event)

    def loaded(self, layers: int) -> None:
        """Sets the engine's number of layers."""
        self._layers = layers

    def copy(self, lane: Lane, size: int, issue: Callable[[], None]) -> None:
        """Calls `issue`, which issues a copy of `size` bytes, and times the copy."""
        issued = self._new_event()
        issued.record(self._idle)
        start = self._record(lane)
        issue()
        self._enter(_Copy(lane, issued, start, self._record(lane), size))

    def gated(self, layer: int, event: Event) -> None:
        """The next step waits for the event before that layer."""
        self._waits.append(Wait(layer, event))

    def held(self, event: Event) -> None:
        """The next step waits as a whole for the event. Called before the wait is issued."""
        self._start = self._start or self._record(Lane.COMPUTE)
        self._waits.append(Wait(0, event))

    def step(self, size: int, issue: Callable[[], None]) -> None:
        """Calls `issue`, which issues a step of `size` tokens, and times the step."""
        if not self._waits and self._report is None:
            issue()
            return
        start = self._start or self._record(Lane.COMPUTE)
        issue()
        self._enter(_Step(self._waits, start, self._record(Lane.COMPUTE), size))
        self._waits = []
        self._start = None

    def read(self) -> TransferSeconds:
        """Returns the seconds of all complete work."""
        while self._pending and self._pending[0].complete():
            match self._pending.popleft():
                case _Copy(lane, issued, start, end, size):
                    self._seconds[lane] += _seconds(start, end)
                    # A lane without work may be faster than the idle stream by some microseconds.
                    waited = max(0.0, _seconds(issued, start))
                    before = self._queued[lane]
                    self._queued[lane] = Waits(before.seconds + waited, before.copies + 1)
                case _Step(waits, start, end, size):
                    lane = Lane.COMPUTE
                    opened = [(layer, _seconds(start, event)) for layer, event in waits]
                    self._exposed += exposed_seconds(_seconds(start, end), self._layers, opened)
            if self._report is not None and self._clock is not None:
                self._report(Work(lane, self._clock.read(start), self._clock.read(end), size))
        seconds, queued = self._seconds, self._queued
        return TransferSeconds(
            seconds[Lane.IN], seconds[Lane.OUT], self._exposed, queued[Lane.IN], queued[Lane.OUT]
        )

    def _record(self, lane: Lane) -> Event:
        event = self._new_event()
        event.record(self._streams[lane])
        return event

    def _enter(self, entry: _Copy | _Step) -> None:
        self._pending.append(entry)
        if len(self._pending) > MOST_PENDING:
            self.read()


def exposed_seconds(total: float, layers: int, opened: Sequence[tuple[int, float]]) -> float:
    """Returns how much of a step's time was waiting, if its layers take equally long.

    opened: (first layer behind a gate, when it opened). Layer l cannot end before the gates up to
    it have opened, and then the remaining layers take their time. So one layer takes c seconds,
    where

        end = max(layers * c, opened[i] + (layers - layer[i]) * c for all i)
    """
    layer_seconds = min(
        [
            total / layers,
            *(max(0.0, total - max(0.0, time)) / (layers - layer) for layer, time in opened),
        ]
    )
    return total - layers * layer_seconds


def _seconds(start: Event, end: Event) -> float:
    return start.elapsed_time(end) / 1e3
