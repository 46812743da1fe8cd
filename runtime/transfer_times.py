"""Times copies on their lanes, and what steps waited for them, with events of the device. Nothing here waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..scheduler.plan import Lane
from .device import TransferSeconds

MOST_PENDING = 256  # then those that are complete are added up, whether or not anybody asks


class Event(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both are complete. Negative if it came later."""


class Wait(NamedTuple):
    """A step's layers from `layer` on begin behind the event."""

    layer: int
    event: Event


class _Copy(NamedTuple):
    lane: Lane
    start: Event
    end: Event


class _Step(NamedTuple):
    waits: list[Wait]
    start: Event
    end: Event


class TransferTimes:
    """To be told what is put on the streams, in the order of issue, by the thread that does it."""

    def __init__(self, new_event: Callable[[], Event], streams: dict[Lane, Any]):
        self._new_event, self._streams = new_event, streams
        self._seconds = dict.fromkeys((Lane.IN, Lane.OUT), 0.0)
        self._exposed = 0.0
        self._pending: deque[_Copy | _Step] = deque()
        self._waits: list[Wait] = []
        self._start: Event | None = None
        self._layers = 1

    def loaded(self, layers: int) -> None:
        """The engine has so many layers."""
        self._layers = layers

    def copy(self, lane: Lane, issue: Callable[[], None]) -> None:
        """Around the issuing of a copy."""
        start = self._record(lane)
        issue()
        self._enter(_Copy(lane, start, self._record(lane)))

    def gated(self, layer: int, event: Event) -> None:
        """The next step waits for the event before that layer."""
        self._waits.append(Wait(layer, event))

    def held(self, event: Event) -> None:
        """The next step waits for the event as a whole; told before the wait is issued."""
        self._start = self._start or self._record(Lane.COMPUTE)
        self._waits.append(Wait(0, event))

    def step(self, issue: Callable[[], None]) -> None:
        """Around the issuing of a step."""
        if not self._waits:
            issue()
            return
        start = self._start or self._record(Lane.COMPUTE)
        issue()
        self._enter(_Step(self._waits, start, self._record(Lane.COMPUTE)))
        self._waits, self._start = [], None

    def read(self) -> TransferSeconds:
        """Of what is complete."""
        while self._pending and self._pending[0].end.query():
            match self._pending.popleft():
                case _Copy(lane, start, end):
                    self._seconds[lane] += _seconds(start, end)
                case _Step(waits, start, end):
                    opened = [(layer, _seconds(start, event)) for layer, event in waits]
                    self._exposed += exposed_seconds(_seconds(start, end), self._layers, opened)
        return TransferSeconds(self._seconds[Lane.IN], self._seconds[Lane.OUT], self._exposed)

    def _record(self, lane: Lane) -> Event:
        event = self._new_event()
        event.record(self._streams[lane])
        return event

    def _enter(self, entry: _Copy | _Step) -> None:
        self._pending.append(entry)
        if len(self._pending) > MOST_PENDING:
            self.read()


def exposed_seconds(total: float, layers: int, opened: Sequence[tuple[int, float]]) -> float:
    """How much of a step's time was waiting, if its layers take equally long.

    opened: (first layer behind a gate, when it opened). Layer l cannot end before the gates up to it have opened, and
    the layers behind it take their time. So one layer takes c seconds, where

        end = max(layers * c, opened[i] + (layers - layer[i]) * c for all i)
    """
    layer_seconds = min(
        [total / layers, *(max(0.0, total - max(0.0, time)) / (layers - layer) for layer, time in opened)]
    )
    return total - layers * layer_seconds


def _seconds(start: Event, end: Event) -> float:
    return start.elapsed_time(end) / 1e3
