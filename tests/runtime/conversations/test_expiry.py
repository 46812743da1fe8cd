"""Deletions in small pieces: what has expired, long conversations, and what other servers have
deleted."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pensieve.runtime.conversations import store as store_module
from pensieve.runtime.conversations import turns as turns_module
from pensieve.runtime.conversations.databases import Postgres
from pensieve.runtime.conversations.schema import Gone, Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.messages import Forget
from pensieve.scheduler.types import Erasure, ErrorKind, RequestError

from .test_store import A, B, Make, make, refused, rows, stored, transcript

__all__ = ["make"]  # a fixture

NOW = 1000.0


def expired(store: HistoryStore, count: int) -> list[Name]:
    """Conversations of one turn that have expired at NOW with a TTL of 100 s."""
    names = [Name("", f"c{number}") for number in range(count)]
    for name in names:
        store.commit(name, transcript(name.id, "x"), 1.0, b"salt")
    return names


def sweep(store: HistoryStore, now: float = NOW) -> int:
    """Deletes all that has expired; returns how many conversations."""
    deleted = 0
    while (swept := store.expire(now)).more:
        deleted += swept.conversations
    return deleted + swept.conversations


def conversations(store: HistoryStore) -> int:
    return int(store._db.execute("SELECT count(*) FROM conversations")[0][0])


def test_no_turn_deletes_what_has_expired(make: Make) -> None:
    store = make(history_ttl=100.0)
    names = expired(store, 5)
    store.create(A, NOW)
    store.commit(B, transcript("0", "1"), NOW, opening=store.admit([B], NOW, b"1"))
    store.delete(A, NOW)
    assert rows(store) == 6 and conversations(store) == 6
    for name in names:
        assert store.find(name, NOW) is None, "invisible before"
    with pytest.raises(RequestError, match="there is no conversation"):
        store.fork(names[0], "new", NOW)
    assert sweep(store) == 5 and rows(store) == 1 and conversations(store) == 1


def test_one_transaction_deletes_few_conversations(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number, and by tokens. A conversation's branches go with it, and are told before it."""
    monkeypatch.setattr(store_module, "MOST_EXPIRED", 3)
    store = make(history_ttl=100.0)
    expired(store, 7)
    assert [store.expire(NOW) for _ in range(4)] == [(3, True), (3, True), (1, True), (0, False)]
    assert len(store.take_expired()) == 7
    expired(store, 5)
    monkeypatch.setattr(store_module, "MOST_EXPIRED_TOKENS", 12)  # each has 6
    assert [store.expire(NOW).conversations for _ in range(4)] == [2, 2, 1, 0]
    store.take_expired()
    openings = [store.admit([A], 1.0, bytes([at])) for at in range(3)]
    for at, opening in enumerate(openings):
        store.commit(A, transcript(str(at), "x"), 1.0, opening=opening)
    assert sweep(store) == 3 and rows(store) == 0
    assert sorted(gone.name.kind for gone in store.take_expired()) == [
        "branch",
        "branch",
        "conversation",
    ]


def test_an_own_lifetime_counts_instead_of_the_default_one(make: Make) -> None:
    store = make(history_ttl=100.0)
    first, second = expired(store, 2)
    store.change(first, 1.0, history_ttl=10_000.0)
    store.change(second, 1.0, history_ttl=5.0)
    assert sweep(store, 7.0) == 1 and store.find(first, 7.0) is not None
    assert sweep(store, 9000.0) == 0 and sweep(store, 10_001.0) == 1
    forever = make()
    expired(forever, 2)
    assert sweep(forever, 1e12) == 0


def test_expired_conversations_are_found_by_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of an older program too, after one start."""
    path = tmp_path / "file"
    HistoryStore(path).close()
    with sqlite3.connect(path) as db:
        for name in ("conversations_due", "conversations_due_own", "conversations_removed"):
            db.execute(f"DROP INDEX {name}")
    db.close()
    store = HistoryStore(path, history_ttl=100.0)
    execute = store._db.execute
    plans = list[str]()

    def explained(sql: str, values: Any = None) -> list[Any]:
        if sql.lstrip().startswith("SELECT"):
            plans.extend(row[3] for row in execute(f"EXPLAIN QUERY PLAN {sql}", values))
        return execute(sql, values)

    monkeypatch.setattr(store._db, "execute", explained)
    store.expire(NOW)
    used = " ".join(plans)
    assert all(
        f"INDEX {name} " in f"{used} " for name in ("conversations_due", "conversations_removed")
    )
    assert "conversations_due_own" in used and "TEMP B-TREE" not in used
    assert not [step for step in plans if step.startswith("SCAN") and "INDEX" not in step]
    store.close()


# -- long conversations


def long_one(store: HistoryStore, name: Name, turns: int, first: int = 0) -> None:
    for count in range(2 * first + 2, 2 * turns + 2, 2):
        store.commit(name, transcript(*map(str, range(count))), 1.0, b"salt")


@pytest.mark.parametrize("way", ["deleted", "expired", "replaced"])
def test_a_long_conversation_is_deleted_a_few_turns_at_a_time(
    way: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is free at once, and a fork keeps what it shares. After a restart in between, the
    rest is deleted."""
    monkeypatch.setattr(store_module, "MOST_TURNS", 4)
    store = make(history_ttl=100.0, server="one")
    long_one(store, B, 2)
    store.fork(B, "a", 1.0)
    long_one(store, A, 12, first=2)
    store.change(B, 1.0, history_ttl=1e9)
    whole = transcript(*map(str, range(24)))
    gone = Gone(A, "a", whole.tokens, 12, b"salt")
    match way:
        case "deleted":
            assert store.delete(A, 2.0) == gone
        case "expired":
            assert store.expire(NOW) == (1, True) and store.take_expired() == [gone]
        case "replaced":
            store.commit(A, transcript("new", "x"), 1.0)
    left = rows(store)
    assert left >= 12
    if way != "replaced":
        store.create(A, NOW)
    else:
        assert stored(store, A) == transcript("new", "x")
        left -= 1
    again = store
    if store.shared:
        store.close()
        again = make(history_ttl=100.0)
    counts = [left]
    while counts[-1] > 2:
        assert again.expire(90.0).more
        counts.append(rows(again) - (way == "replaced"))
    assert all(0 < before - after <= 4 for before, after in pairwise(counts))
    assert stored(again, B) == transcript("0", "1", "2", "3")
    assert conversations(again) == 2 and again.take_expired() == []
    listed, more = again.page("", 9, None, True, 2.0)
    assert len(listed) == 2 and not more


def test_many_large_branches_are_deleted_one_after_the_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their conversation, whose deletion then says that all of its log was its own."""
    monkeypatch.setattr(store_module, "MOST_EXPIRED_TOKENS", 12)  # each has 6

    async def work() -> None:
        store = make()
        loop = Loop()
        openings = [store.admit([A], 1.0, bytes([at])) for at in range(6)]
        for at, opening in enumerate(openings):
            store.commit(A, transcript("0", str(at)), 1.0, opening=opening)
        removed: list[int] = []
        remove = store._remove_all
        monkeypatch.setattr(
            store, "_remove_all", lambda some: removed.append(len(some)) or remove(some)
        )
        turns = TurnManager(store, lambda message: None, loop.erase, None)
        deletion = asyncio.create_task(turns.delete(A))
        await until(lambda: len(loop.told) == 6)
        loop.answer()
        await deletion
        assert removed == [2, 2, 1, 1]
        assert [message.shared for message in loop.told] == [0] * 6 and rows(store) == 0
        with pytest.raises(RequestError, match="there is no conversation"):
            await turns.delete(A)
        await turns.close()

    asyncio.run(work())


def test_what_is_left_of_a_long_conversation_does_not_count(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a quota, for what another conversation shares, or in an import."""
    monkeypatch.setattr(store_module, "MOST_TURNS", 4)
    store = make(quota=2)
    long_one(store, B, 2)
    store.fork(B, "a", 1.0)
    long_one(store, A, 12, first=2)
    store.delete(A, 2.0)
    store.create(A, 2.0)
    assert store.delete(B, 2.0).shared == 0
    if store.shared:
        return
    target = HistoryStore(":memory:")
    assert target.copy_from(store._db) == (1, 0)
    while target.expire(NOW).more:
        pass
    assert rows(target) == 0 and conversations(target) == 1
    target.close()


def test_deletions_in_pieces_tell_the_same_as_whole_ones(
    histories_at: str, make: Make, monkeypatch: Any
) -> None:
    """Random trees of forks, branches and responses, of which a random part has expired."""

    def gone_of(most_turns: int, seed: int) -> tuple[list[Gone], int]:
        monkeypatch.setattr(store_module, "MOST_TURNS", most_turns)
        draw = random.Random(seed)
        # The second store's name comes first, so it is the one that deletes.
        store = make(history_ttl=100.0, server=f"{most_turns:04}")
        for table in ("open_turns", "conversations", "turns"):
            store._db.execute(f"DELETE FROM {table}")
        truth: dict[Name, tuple[str, ...]] = {}
        deleted: list[Gone] = []
        for step in range(60):
            name = Name(
                "", draw.choice("abcd"), draw.choice(("conversation", "conversation", "response"))
            )
            opening = store.admit([name], 1.0, bytes([step])) if draw.random() < 0.3 else None
            words = truth.get(name, ())
            words = (
                *words[: draw.randrange(len(words) + 1)],
                *(draw.choice("xyz") for _ in range(4)),
            )
            if name.kind == "conversation" and name not in truth and truth and draw.random() < 0.5:
                source = draw.choice(list(truth))
                if source.kind == "conversation":
                    store.fork(source, name.id, 1.0)
                    truth[name] = truth[source]
                    continue
            if name in truth and draw.random() < 0.1:
                deleted += [store.delete(name, 1.0), *store.take_expired()]
                del truth[name]
                continue
            if opening is not None and name in truth and draw.random() < 0.5:
                # the turn becomes a branch
                store.commit(name, transcript(*truth[name], "between"), 1.0)
            store.commit(name, transcript(*words), 1.0, opening=opening)
            truth[name] = tuple(message["content"] for message in stored(store, name).messages)
        kept = [name for name in truth if draw.random() < 0.5]
        for name in kept:
            if name.kind == "conversation":
                store.change(name, 1.0, history_ttl=1e9)
            else:
                store._db.execute(
                    "UPDATE conversations SET history_ttl = 1e9 WHERE id = :id", {"id": name.id}
                )
        store._db.execute("DELETE FROM open_turns")
        deleted += store.take_expired()
        sweep(store)
        for name in kept:
            assert [m["content"] for m in stored(store, name, NOW).messages] == list(truth[name])
        used = store._db.execute(
            "WITH RECURSIVE used (n) AS (SELECT head FROM conversations UNION SELECT parent FROM "
            "turns JOIN used "
            "ON number = n WHERE parent IS NOT NULL) SELECT count(*) FROM used"
        )
        assert rows(store) == used[0][0] or rows(store) == 0 == len(kept)
        return deleted + store.take_expired(), rows(store)

    for seed in range(8 if histories_at == ":memory:" else 1):
        whole, pieces = gone_of(1000, seed), gone_of(2, seed)
        assert len(whole[0]) > 3 and pieces == whole


def test_a_tokenizer_is_given_to_a_few_turns_at_a_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of an older program have none, and an import may bring many."""
    monkeypatch.setattr(store_module, "MOST_ADOPTED", 2)
    store = make()
    long_one(store, A, 7)
    store._db.execute("UPDATE turns SET tokenizer = NULL")
    store.use_tokenizer(b"ours")
    assert store._db.execute("SELECT DISTINCT tokenizer FROM turns") == [(b"ours",)]
    assert stored(store, A) == transcript(*map(str, range(14)))


# -- several servers


def pair(postgres: str, **options: Any) -> tuple[HistoryStore, HistoryStore]:
    one, two = (HistoryStore(postgres, server=name, **options) for name in ("one", "two"))
    one.register()
    two.register()
    return one, two


def test_one_of_several_servers_deletes_what_has_expired(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each conversation is deleted once, and told to both. The other server goes on if the first
    one is silent."""
    monkeypatch.setattr(store_module, "MOST_EXPIRED", 2)
    one, two = pair(postgres, history_ttl=100.0)
    names = expired(one, 6)
    assert [store.expire(NOW) for store in (one, two, one)] == [(2, True), (0, False), (2, True)]
    assert sweep(one) == 2 and rows(one) == 0
    for store in (one, two):
        store.keep_in_step([], store.seen)
        assert sorted(gone.name for gone in store.take_expired()) == names
    expired(one, 4)
    assert one.expire(NOW) == (2, True)
    one._db.execute("UPDATE servers SET alive = alive - 100 WHERE id = 'one'")
    assert sweep(two) == 2 and sweep(one) == 0
    for store in (one, two):
        store.close()


def test_a_deletion_whose_commit_has_no_answer_is_told_later(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its tombstone, once. Of a deletion whose answer has come the tombstone tells nothing."""
    one, two = pair(postgres, history_ttl=100.0)
    (name,) = expired(one, 1)
    one.create(A, NOW)
    one.create(B, NOW)
    told = [one.delete(B, NOW).name]
    lose = True
    send = Postgres._rows

    def lost(database: Postgres, sql: str, values: Any) -> list[Any]:
        nonlocal lose
        answer = send(database, sql, values)
        if sql == "COMMIT" and lose:
            lose = False
            raise psycopg.OperationalError("the connection is lost")
        return answer

    monkeypatch.setattr(Postgres, "_rows", lost)
    refused(ErrorKind.UNAVAILABLE, one.expire, NOW)
    lose = True
    refused(ErrorKind.UNAVAILABLE, one.delete, A, NOW)
    assert conversations(one) == 0 and one.take_expired() == []
    for _ in range(2):
        one.keep_in_step([], one.seen)
        two.keep_in_step([], two.seen)
    assert [gone.name for gone in one.take_expired()] == [name, A]
    assert [gone.name for gone in two.take_expired()] == [*told, name, A]
    one.create(A, NOW)
    one.delete(A, NOW)
    one.keep_in_step([], one.seen)
    assert one.take_expired() == [] and one._told_early == set()
    for store in (one, two):
        store.close()


def test_deletions_of_others_are_read_a_few_at_a_time(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_TOMBSTONES", 4)
    one, two = pair(postgres, history_ttl=100.0)
    names = expired(one, 7)
    sweep(one)
    two.keep_in_step([], two.seen)
    assert two.behind and [gone.name for gone in two.take_expired()] == names[:4]
    two.keep_in_step([], two.seen, read=False)
    assert two.behind and two.take_expired() == []
    two.keep_in_step([], two.seen)
    assert not two.behind and [gone.name for gone in two.take_expired()] == names[4:]
    monkeypatch.setattr(store_module, "MOST_TOMBSTONE_BYTES", 50)  # each has 24
    monkeypatch.setattr(store_module, "MOST_ERASED_TOMBSTONES", 2)
    names = expired(one, 5)
    sweep(one)
    for read in (2, 2, 1):
        two.keep_in_step([], two.seen)
        assert [gone.name for gone in two.take_expired()] == names[:read]
        del names[:read]
    for _ in range(8):
        one.keep_in_step([], one.seen)
        two.keep_in_step([], two.seen)
    assert one._db.execute("SELECT count(*) FROM tombstones") == [(0,)]
    for store in (one, two):
        store.close()


def test_a_turn_learns_first_that_its_conversation_was_deleted(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far its server is behind. It learns it once, so that the new conversation's KV is not
    erased."""
    monkeypatch.setattr(store_module, "MOST_TOMBSTONES", 2)
    one, two = pair(postgres, history_ttl=100.0, quota=100)
    names = expired(one, 9)
    sweep(one)
    two.admit([names[7]], NOW, b"1")
    assert [gone.name for gone in two.take_expired()] == [*names[:2], names[7]]
    two.quota = 0
    with pytest.raises(RequestError, match="the most it may have"):
        two.admit([names[6]], NOW, b"2")
    assert two.take_expired() == [], "a transaction that failed has told nothing"
    two.quota = 100
    two.admit([names[6]], NOW, b"2")
    assert [gone.name for gone in two.take_expired()] == [*names[2:4], names[6]]
    while two.behind:
        two.keep_in_step([], two.seen)
    assert [gone.name for gone in two.take_expired()] == [*names[4:6], names[8]]
    for store in (one, two):
        store.close()


def test_tables_of_an_older_program_get_the_indexes(postgres: str) -> None:
    HistoryStore(postgres).close()
    database = Postgres(postgres)
    for name in (
        "conversations_due",
        "conversations_due_own",
        "conversations_removed",
        "tombstones_named",
        "branches_of",
    ):
        database.execute(f"DROP INDEX {name}")
    HistoryStore(postgres).close()
    listed = database.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'pensieve'")
    assert {"conversations_due", "conversations_due_own", "conversations_removed"} <= {
        name for (name,) in listed
    }
    database.close()


# -- in the background


class Loop:
    """The engine's loop: what it is to erase, and its answers, which wait for `answer`."""

    def __init__(self) -> None:
        self.told: list[Forget] = []
        self.answers: list[asyncio.Future[Erasure]] = []

    def erase(self, message: Forget) -> asyncio.Future[Erasure]:
        self.told.append(message)
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def answer(self) -> None:
        for answer in self.answers:
            answer.set_result(Erasure.WHOLLY)
        self.answers.clear()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


def test_expired_conversations_are_deleted_in_the_background(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns come between two pieces, and no piece before the loop has erased the KV of those before
    it."""
    monkeypatch.setattr(store_module, "MOST_EXPIRED", 2)
    monkeypatch.setattr(turns_module, "EXPIRY_SECONDS", 0.001)
    monkeypatch.setattr(turns_module, "CATCH_UP_SECONDS", 0.001)
    monkeypatch.setattr(turns_module, "MOST_UNERASED", 250)  # two conversations and a half
    caplog.set_level(logging.INFO, "pensieve.runtime.conversations")

    async def work() -> None:
        loop = Loop()
        store = make(history_ttl=100.0)
        names = expired(store, 6)
        calls: list[str] = []
        expire = store.expire
        monkeypatch.setattr(store, "expire", lambda now: calls.append("expire") or expire(now))
        monkeypatch.setattr(store, "now", lambda: NOW)
        turns = TurnManager(store, lambda message: None, loop.erase, None)
        turns.expire_in_background()
        await until(lambda: len(loop.told) == 4)
        turn = await turns.open_completion("", "new", array("i", [1, 2]))
        await turn.commit([3], "", None, b"")
        turn.close()
        assert len(loop.told) == len(calls) * 2 == 4, "the loop has not answered yet"
        loop.answer()
        await until(lambda: len(loop.told) == 6)
        loop.answer()
        await until(lambda: bool(caplog.messages))
        assert [message.conversation for message in loop.told] == [name.id for name in names]
        assert caplog.messages == ["deleted 6 expired conversations, branches and responses"]
        assert (await turns.load(Name("", "new")))[0].tokens == 3
        await turns.close()

    asyncio.run(work())


def test_a_database_that_does_not_answer_is_asked_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns_module, "EXPIRY_SECONDS", 0.001)

    async def work() -> None:
        loop = Loop()
        store = make(history_ttl=100.0)
        expired(store, 1)
        expire = store.expire
        refusals = [
            RequestError(ErrorKind.UNAVAILABLE, "away"),
            RequestError(ErrorKind.STORAGE_FULL, "full"),
        ]

        def unsure(now: float) -> Any:
            if refusals:
                raise refusals.pop()
            return expire(NOW)

        monkeypatch.setattr(store, "expire", unsure)
        turns = TurnManager(store, lambda message: None, loop.erase, None)
        turns.expire_in_background()
        await until(lambda: len(loop.told) == 1)
        await until(lambda: turns.fault is None)
        assert caplog.messages[0] == "expiry: full"
        await turns.close()

    asyncio.run(work())


def test_background_work_is_tried_again_soon_after_a_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/health` shows the failure until then."""
    monkeypatch.setattr(turns_module, "RECOVERY_S", 0.001)

    async def work() -> None:
        turns = TurnManager(make(), lambda message: None, Loop().erase, None)
        waits = iter((0.0, 1e9, 1e9, 1e9))
        answers = [
            RequestError(ErrorKind.UNAVAILABLE, "away"),
            RequestError(ErrorKind.UNAVAILABLE, "away"),
        ]
        done = asyncio.Event()

        async def fail_twice() -> None:
            if answers:
                raise answers.pop()
            done.set()

        turns._repeat("work", lambda: next(waits), fail_twice)
        await until(lambda: turns.fault == "away")
        await done.wait()
        await until(lambda: turns.fault is None)
        await turns.close()

    asyncio.run(work())


def test_the_first_sweep_comes_after_a_while(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a machine that starts may be wrong at first."""
    waits: list[Callable[[], float]] = []

    async def work() -> None:
        turns = TurnManager(make(), lambda message: None, Loop().erase, None)
        monkeypatch.setattr(turns, "_repeat", lambda name, seconds, work: waits.append(seconds))
        turns.expire_in_background()
        assert [seconds() for seconds in waits] == [turns_module.EXPIRY_SECONDS]
        await turns.close()

    asyncio.run(work())


def test_a_server_that_may_not_read_on_waits_for_its_next_renewal(make: Make) -> None:
    async def work() -> None:
        store = make()
        turns = TurnManager(store, lambda message: None, Loop().erase, None)
        usual = store.lease / 3
        assert turns._until_renewal() == usual
        store.behind = True
        assert turns._until_renewal() == turns_module.CATCH_UP_SECONDS
        turns._unerased = turns_module.MOST_UNERASED + 1
        assert turns._until_renewal() == usual
        turns._unerased = 0
        await turns.close()

    asyncio.run(work())
