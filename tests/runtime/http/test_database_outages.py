"""The database of the histories goes away and comes back: no acknowledged turn is lost, and none is
stored twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pensieve.runtime.conversations import databases, turns
from pensieve.runtime.conversations.store import HistoryStore

from ...postgres import PrivatePostgres
from ..served import CHAT, run, serve

__all__ = ["serve"]  # a fixture

CONVERSATIONS = "/v1/conversations"


@pytest.fixture
def database() -> Iterator[PrivatePostgres]:
    """Of this test alone: it is stopped."""
    with PrivatePostgres() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(databases.Postgres, "lease", 0.3)
    monkeypatch.setattr(turns, "COMMIT_RETRY_S", 0.05)
    monkeypatch.setattr(turns, "RECOVERY_S", 0.01)


async def begun(server: Any, *contents: str, **body: Any) -> asyncio.Task[Any]:
    """A turn that is in the engine."""
    server.loop.pause()
    count = len(server.requests)
    turn = asyncio.create_task(server.chat(*contents, **body))
    while len(server.requests) == count:
        await asyncio.sleep(0.005)
    return turn


async def messages(server: Any, name: str) -> list[str]:
    return [
        message["content"]
        for message in (await server.ask("GET", f"{CONVERSATIONS}/{name}"))["messages"]
    ]


def test_a_reply_waits_for_a_database_that_comes_back(
    serve: Any, database: PrivatePostgres
) -> None:
    async def work() -> None:
        async with serve(database.url) as server:
            first = await server.chat("hello", conversation="a")
            turn = await begun(server, "more", conversation="a", history="server")
            await asyncio.to_thread(database.stop, "immediate")
            server.loop.go_on()
            await server.until_healthy(False)
            assert not turn.done()
            assert "does not answer" in (await server.ask("GET", "/health"))["histories"]["reason"]
            await asyncio.to_thread(database.start)
            reply = await turn
            await server.until_healthy(True)
            assert await messages(server, "a") == ["hello", first, "more", reply]

    run(work())


def test_while_the_database_is_away_nothing_is_acknowledged_that_is_not_stored(
    serve: Any, database: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "COMMIT_PATIENCE_S", 0.3)

    async def work() -> None:
        async with serve(database.url) as server:
            first = await server.chat("hello", conversation="a")
            server.loop.pause()
            body = dict(
                messages=[{"role": "user", "content": "more"}], conversation="a", history="server"
            )
            turn = asyncio.create_task(server.http.post(CHAT, json=body | {"stream": True}))
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(database.stop)
            server.loop.go_on()
            text = (await turn).text
            *_, last, done, _ = text.split("\n\n")
            assert "does not answer; try again" in last and done == "data: [DONE]"
            error = (await server.post(CHAT, 503, **body))["error"]
            assert "does not answer; try again" in error["message"]
            await server.ask("GET", f"{CONVERSATIONS}/a", 503)
            assert await server.chat("hello"), "what has no name needs no database"
            await asyncio.to_thread(database.start)
            assert await messages(server, "a") == ["hello", first]
            second = await server.chat("more", conversation="a", history="server")
            assert await messages(server, "a") == ["hello", first, "more", second]

    run(work())


def test_a_commit_whose_answer_is_lost_is_repeated_and_stored_once(
    serve: Any, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = databases.Postgres._rows
    stored: list[str] = []
    lost: list[str] = []

    def lose(database: databases.Postgres, sql: str, values: Any) -> Any:
        result = rows(database, sql, values)
        if sql.startswith("INSERT INTO turns"):
            stored.append(sql)
        if sql == "COMMIT" and stored:
            stored.clear()
            lost.append(sql)
            database.interrupt()
            rows(database, "SELECT 1", None)
        return result

    monkeypatch.setattr(databases.Postgres, "_rows", lose)

    async def work() -> None:
        async with serve(postgres) as server:
            reply = await server.chat("hello", conversation="a")
            more = await server.chat("more", conversation="a", history="server")
            assert len(lost) == 2
            assert await messages(server, "a") == ["hello", reply, "more", more]
            assert await server.histories.run(
                server.store._db.execute, "SELECT count(*) FROM turns"
            ) == [(2,)]

    run(work())


@pytest.mark.slow
def test_a_database_that_hangs_is_given_up_and_found_again(
    serve: Any, database: PrivatePostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "CONNECT_SECONDS", 2)  # the least that libpq takes

    async def work() -> None:
        async with serve(database.url) as server:
            first = await server.chat("hello", conversation="a")
            monkeypatch.setattr(turns, "HUNG_SECONDS", 2.0)
            database.pause()
            await server.ask("GET", f"{CONVERSATIONS}/a", 503)
            await server.until_healthy(False)
            database.go_on()
            await server.until_healthy(True)
            assert await messages(server, "a") == ["hello", first]

    run(work())


def test_one_answer_of_a_database_that_was_restarted_is_not_missed(
    serve: Any, database: PrivatePostgres
) -> None:
    """A connection that was idle meanwhile is made anew, and no request sees it."""

    async def work() -> None:
        async with serve(database.url) as server:
            for turn in ("hello", "more"):
                await server.chat(turn, conversation=turn)
                await asyncio.to_thread(database.stop)
                await asyncio.to_thread(database.start)
                assert len(await messages(server, turn)) == 2
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name "
                    "= 'pensieve'"
                )
            await server.chat("and", conversation="hello", history="server")

    run(work())


@contextlib.contextmanager
def refusing(url: str, table: str, state: str) -> Iterator[None]:
    """While it is open, the database answers changes of the table's rows with this SQLSTATE."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE OR REPLACE FUNCTION pensieve.refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{state}'; END $$"
        )
        connection.execute(
            f"CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON pensieve.{table} "
            "FOR EACH ROW EXECUTE FUNCTION pensieve.refuse()"
        )
        yield
        connection.execute(f"DROP TRIGGER refuse ON pensieve.{table}")


@pytest.mark.parametrize("state", ["25P03", "40P01", "53100", "58030", "XX000", "42P01", "23505"])
def test_leases_are_renewed_again_after_any_error_of_the_database(
    serve: Any, postgres: str, state: str
) -> None:
    async def work() -> None:
        async with serve(postgres) as server:
            await server.chat("hello", conversation="a")
            with refusing(postgres, "servers", state):
                health = await server.until_healthy(False)
                assert health["reason"]
                assert "pensieve:histories_healthy 0.0" in (await server.http.get("/metrics")).text
            await server.until_healthy(True)
            assert "pensieve:histories_healthy 1.0" in (await server.http.get("/metrics")).text
            await server.chat("more", conversation="a", history="server")

    run(work())


def test_a_transaction_that_pauses_for_too_long_is_tried_again_later(
    serve: Any, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after a stop of the whole process: the database has ended the session meanwhile."""
    find = HistoryStore._find
    paused = list[str]()

    def pausing(store: HistoryStore, *args: Any) -> Any:
        conversation = find(store, *args)
        if paused:
            store._db.execute("SET LOCAL idle_in_transaction_session_timeout = 20")
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
            with psycopg.connect(postgres, autocommit=True) as connection:
                pid = store._db._connection.info.backend_pid  # type: ignore[attr-defined]
                while connection.execute(waiting, [pid]).fetchone() != (0,):
                    time.sleep(0.005)
            paused.pop()
        return conversation

    monkeypatch.setattr(HistoryStore, "_find", pausing)

    async def work() -> None:
        async with serve(postgres) as server:
            first = await server.chat("hello", conversation="a")
            body = dict(messages=[{"role": "user", "content": "more"}], conversation="a")
            paused.append("while the turn opens")
            refused = await server.http.post(CHAT, json=body | {"history": "server"})
            assert refused.status_code == 503, refused.text
            assert refused.headers["retry-after"] == "1"
            turn = await begun(server, "more", conversation="a", history="server")
            paused.append("while it is stored")
            server.loop.go_on()
            reply = await turn
            assert not paused
            assert await messages(server, "a") == ["hello", first, "more", reply]

    run(work())
