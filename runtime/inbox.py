"""The queue of a thread that waits for messages until a given time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from queue import Empty
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """For one reader. Any thread may `put`, and so may signal handlers, also the reader's own.

    `queue.SimpleQueue` does not do: before Python 3.13 its wait lasts for ever if its time is over
    when it looks at the clock, as after a signal.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._nothing_new = threading.Lock()  # held until an item comes
        self._nothing_new.acquire()

    def empty(self) -> bool:
        return not self._items

    def put(self, item: Item) -> None:
        self._items.append(item)
        with contextlib.suppress(RuntimeError):  # it is free: the reader will look anyway
            self._nothing_new.release()

    def get(self, timeout: float | None = None) -> Item:
        """Returns the next item. Raises Empty if none comes within `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._items:
            left = -1 if until is None else max(0.0, until - time.monotonic())
            if not self._nothing_new.acquire(timeout=left) and not self._items:
                raise Empty
        return self._items.popleft()
