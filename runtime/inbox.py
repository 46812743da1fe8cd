"""The queue of a thread that waits for messages until a given time."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


class Inbox(SimpleQueue[Item]):
    """A `SimpleQueue` for one reader, whose waits end in time. Signal handlers may `put`."""

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """Returns the next item. Raises Empty if none comes within `timeout` seconds."""
        # Before Python 3.13, a wait that finds the queue's lock free takes it, and then waits for
        # ever if its time is over by then. A look without waiting takes the lock before.
        with contextlib.suppress(Empty):
            return super().get(block=False)
        return super().get(block, timeout)
