"""Waits of the loop's queue."""

from __future__ import annotations

import threading
from queue import Empty

import pytest

from pensieve.runtime.inbox import Inbox


def test_a_wait_ends_whose_time_is_over_before_it_begins() -> None:
    """Python's own queue waits for ever after some thousand rounds. The reply of a client that was
    alone then stopped until another message came."""
    inbox: Inbox[int] = Inbox()
    rounds = []

    def read() -> None:
        for number in range(20_000):
            inbox.put(number)
            rounds.append(inbox.get(timeout=1.0))
            with pytest.raises(Empty):
                inbox.get(timeout=1e-9)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)
    assert rounds == list(range(20_000))


def test_a_wait_ends_when_an_item_comes() -> None:
    inbox: Inbox[int] = Inbox()
    threading.Timer(0.05, lambda: inbox.put(1)).start()
    assert inbox.get(timeout=60.0) == 1


def test_without_an_item_it_says_so() -> None:
    inbox: Inbox[int] = Inbox()
    for timeout in (0.0, 0.01):
        with pytest.raises(Empty):
            inbox.get(timeout=timeout)
