"""The clock of the histories, on clocks that the test sets: no jump of a wall clock deletes
conversations."""

from __future__ import annotations

import time

import pytest

from pensieve.runtime.conversations.clock import HistoryClock
from pensieve.runtime.conversations.store import HistoryStore

from .test_store import FIRST, A, B, transcript

HOUR, DAY = 3600.0, 86400.0
TTL = 10 * DAY


class Clocks:
    """`wall` and `boot`: what they show. `pass_`: time passes on both."""

    def __init__(self) -> None:
        self.wall, self.boot = 1_700_000_000.0, 500.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.boot += seconds

    def clock(self) -> HistoryClock:
        return HistoryClock("test", lambda: self.wall, lambda: self.boot)

    def store(self) -> HistoryStore:
        return HistoryStore(":memory:", TTL, wall=lambda: self.wall, boot=lambda: self.boot)


def alive(store: HistoryStore) -> bool:
    """Whether A is, for reads and for expiry."""
    now = store.now()
    store.expire(now)
    assert (store.find(A, now) is not None) == bool(
        store._db.execute("SELECT 1 FROM conversations WHERE id = 'a'")
    )
    return store.find(A, now) is not None


@pytest.mark.parametrize("jump", [1.01 * HOUR, 365 * DAY, -2 * HOUR, -365 * DAY])
def test_a_jump_suspends_expiry_until_the_new_time_has_lasted_a_day(
    jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for _ in range(5):
        clocks.pass_(HOUR)
        assert clock.now() == clocks.wall and not clock.suspended
    clocks.wall += jump
    for _ in range(24):
        now = clock.now()
        assert now == clocks.wall - min(0.0, jump), "what is stored is never too old"
        assert clock.suspended and clock.without_jump(now) == clocks.wall - jump
        clocks.pass_(HOUR)
    assert clock.now() == clocks.wall == clock.without_jump(clocks.wall)
    assert not clock.suspended
    suspended, accepted = caplog.messages
    assert f"jumped by {jump:+.0f} s" in suspended and "no conversation expires until" in suspended
    assert (
        "set the clock" in suspended
        and "restart" in suspended
        and "has kept its new time" in accepted
    )


def test_a_clock_that_is_put_right_again_ends_the_suspension(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    clocks.wall += DAY
    clock.now()
    clocks.pass_(10 * HOUR)
    clock.now()
    clocks.wall += DAY  # another jump: its day begins now
    clock.now()
    clocks.pass_(20 * HOUR)
    clock.now()
    assert clock.suspended
    before = clock.now()
    clocks.wall -= 2 * DAY - 60.0
    now = clock.now()
    assert not clock.suspended and now == clocks.wall == clock.without_jump(before)
    assert [message.partition("(test) ")[2][:10] for message in caplog.messages] == [
        "has jumped",
        "has jumped",
        "is right a",
    ]


def test_small_changes_and_any_stop_between_two_processes_are_normal_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks = Clocks()
    clock = clocks.clock()
    for _ in range(100):
        clocks.pass_(60.0)
        clocks.wall += 0.9 * HOUR
        assert clock.now() == clocks.wall and not clock.suspended
    clocks.wall += 365 * DAY
    clock = clocks.clock()
    clock.now()
    assert not clock.suspended and caplog.messages == []


def test_the_boot_clock_counts_seconds() -> None:
    clock = HistoryClock("test", time.time)
    assert abs(clock.now() - time.time()) < HOUR and not clock.suspended


def test_no_conversation_expires_because_of_a_jump_ahead() -> None:
    clocks = Clocks()
    store = clocks.store()
    store.commit(A, FIRST, store.now())
    clocks.pass_(9 * DAY)
    clocks.wall += 365 * DAY
    assert alive(store)
    listed, _ = store.page("", 9, None, True, store.now())
    assert len(listed) == 1 and store.admit([A], store.now(), b"1", alone=True).seen
    store.release(b"1")
    store.commit(B, transcript("0", "1"), store.now())  # at the new time
    clocks.pass_(0.9 * DAY)
    assert alive(store)
    clocks.wall -= 365 * DAY  # it was wrong
    assert alive(store)
    clocks.pass_(0.2 * DAY)
    assert not alive(store) and store.find(B, store.now()) is not None, "its own time is over"
    store.close()


def test_a_jump_that_lasts_a_day_is_time_that_has_passed() -> None:
    clocks = Clocks()
    store = clocks.store()
    store.commit(A, FIRST, store.now())
    clocks.wall += 365 * DAY
    assert alive(store)
    store.commit(B, transcript("0", "1"), store.now())
    clocks.pass_(DAY)
    assert not alive(store)
    assert store.find(B, store.now()) is not None, "it was used a day ago"
    store.close()


def test_after_a_jump_back_new_conversations_do_not_expire() -> None:
    clocks = Clocks()
    store = clocks.store()
    store.now()
    clocks.wall -= 365 * DAY
    store.commit(A, FIRST, store.now())
    for _ in range(9):
        clocks.pass_(DAY)
        assert alive(store)
    clocks.pass_(365 * DAY)
    assert alive(store), "its time is the one before the jump: the clock may be put right again"
    clocks.pass_(2 * DAY)
    assert not alive(store)
    store.close()


def test_what_is_stored_after_a_jump_back_does_not_expire_when_the_clock_is_put_right() -> None:
    clocks = Clocks()
    store = clocks.store()
    store.commit(B, FIRST, store.now())
    clocks.wall -= 30 * DAY
    store.commit(A, FIRST, store.now())
    store.commit(B, transcript("0", "1", "2", "3"), store.now())
    clocks.pass_(60.0)
    clocks.wall += 30 * DAY
    assert alive(store) and store.find(B, store.now()) is not None
    store.close()


def test_a_time_read_during_a_jump_ahead_deletes_nothing_after_it() -> None:
    """A turn may wait for the database meanwhile."""
    clocks = Clocks()
    store = clocks.store()
    store.commit(A, FIRST, store.now())
    clocks.wall += 365 * DAY
    wrong = store.now()
    clocks.wall -= 365 * DAY
    assert store.now() == clocks.wall
    assert store.admit([A], wrong).seen and store.find(A, wrong) is not None
    store.expire(wrong)
    assert alive(store) and store.take_expired() == []
    store.close()


def test_the_time_of_a_shared_database_is_its_own(postgres: str) -> None:
    """Servers' clocks differ: none of them lets a conversation expire early."""
    right = HistoryStore(postgres, TTL)
    wrong = HistoryStore(postgres, TTL, server="wrong", wall=lambda: time.time() + 365 * DAY)
    right.commit(A, FIRST, right.now())
    assert abs(wrong.now() - right.now()) < HOUR
    assert alive(wrong)
    for store in (right, wrong):
        store.close()


def test_a_jump_of_the_databases_clock_cuts_no_server_off(
    postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it end the turns that are open on other servers."""
    one, two = (HistoryStore(postgres, TTL, server=name) for name in ("one", "two"))
    for store in (one, two):
        store.register()
    one.commit(A, FIRST, one.now())
    two.admit([A], two.now(), b"1", alone=True)
    for store in (one, two):
        store._db.clock = f"({store._db.clock} + {365 * DAY})"
    one.keep_in_step([], 0)
    assert one.clock.suspended and "(PostgreSQL) has jumped" in caplog.text
    assert alive(one)
    assert one._db.execute("SELECT turn FROM open_turns") == [(b"1",)]
    two.keep_in_step([b"1"], 0)
    assert two.clock.suspended and alive(two)
    for store in (one, two):
        store.close()
