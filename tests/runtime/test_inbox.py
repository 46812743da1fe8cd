"""Waits of the loop's queue."""

from __future__ import annotations

import signal
import threading
import time
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


def test_a_signal_does_not_lengthen_a_wait() -> None:
    """Its handler takes longer than what is left of the wait."""
    inbox: Inbox[int] = Inbox()

    def handle(*_: object) -> None:
        time.sleep(0.02)
        signal.setitimer(signal.ITIMER_REAL, 0.003)

    watchdog = threading.Timer(60, lambda: inbox.put(1))
    watchdog.start()
    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.003)
    try:
        for _ in range(100):
            with pytest.raises(Empty):
                inbox.get(timeout=0.004)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        watchdog.cancel()


def test_a_signal_handler_may_put() -> None:
    inbox: Inbox[int] = Inbox()
    before = signal.signal(signal.SIGALRM, lambda *_: inbox.put(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        assert [inbox.get(timeout=60.0) for _ in range(500)] == [1] * 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_items_of_several_threads_come_in_their_order() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()

    def write(thread: int) -> None:
        for number in range(5_000):
            inbox.put((thread, number))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    came: dict[int, list[int]] = {thread: [] for thread in range(4)}
    for _ in range(20_000):
        thread, number = inbox.get(timeout=60.0)
        came[thread].append(number)
    assert came == {thread: list(range(5_000)) for thread in range(4)}
    assert inbox.empty()
