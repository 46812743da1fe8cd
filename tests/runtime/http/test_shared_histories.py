"""Two servers with one PostgreSQL: each goes on from the turns of the other, and no turn disturbs
another one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from pensieve.runtime.conversations import databases
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.messages import Erased, Forget, Submit
from pensieve.scheduler.types import Erasure, RequestError

from ..conversations.test_store import transcript
from ..served import CHAT, run, serve

__all__ = ["serve"]  # a fixture

CONVERSATIONS = "/v1/conversations"


async def until_requests(server: Any, requests: int) -> None:
    while len(server.requests) < requests:
        await asyncio.sleep(0.005)


def test_a_conversation_goes_on_at_another_server(serve: Any, postgres: str) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            reply = await one.chat("hello", conversation="a")
            await two.chat("more", conversation="a", history="server")
            (log,) = one.logs()
            assert two.requests[0].prompt[: len(log)].tolist() == log, (
                "with the ids that were generated"
            )
            whole = await one.ask("GET", f"{CONVERSATIONS}/a")
            assert [message["content"] for message in whole["messages"]][:3] == [
                "hello",
                reply,
                "more",
            ]
            assert len((await two.ask("GET", CONVERSATIONS))["data"]) == 1
            response = await one.post("/v1/responses", input="hello")
            await two.post("/v1/responses", input="more", previous_response_id=response["id"])
            await two.post(CONVERSATIONS, 409, id="a")

    run(work())


def test_one_turn_of_a_server_history_is_in_flight_on_all_servers(
    serve: Any, postgres: str
) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            await one.chat("hello", conversation="a")
            one.loop.pause()
            body = dict(
                messages=[{"role": "user", "content": "x"}], conversation="a", history="server"
            )
            slow = asyncio.create_task(one.post(CHAT, **body))
            await until_requests(one, 2)
            error = (await two.post(CHAT, 409, **body, stream=True))["error"]
            assert "in flight" in error["message"] and not two.requests, (
                "before anything is computed"
            )
            branch = await two.chat("hello", conversation="a")
            one.loop.go_on()
            await slow
            contents = [
                m["content"] for m in (await two.ask("GET", f"{CONVERSATIONS}/a"))["messages"]
            ]
            assert contents[2] == "x" and len(contents) == 4 and branch
            await two.post(CHAT, **body)

    run(work())


def test_a_lease_is_renewed_while_its_turn_runs(serve: Any, postgres: str) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            one.store.lease = 3.0
            await one.chat("hello", conversation="a")
            one.loop.pause()
            body = dict(
                messages=[{"role": "user", "content": "x"}], conversation="a", history="server"
            )
            slow = asyncio.create_task(one.post(CHAT, **body))
            await until_requests(one, 2)

            async def lease_end() -> float:
                return float(
                    (
                        await one.histories.run(
                            one.store._db.execute, "SELECT until FROM open_turns"
                        )
                    )[0][0]
                )

            first = await lease_end()
            while await lease_end() < first + 3.0:  # longer than the lease
                await asyncio.sleep(0.05)
            one.store.lease = 600.0  # it does not end before the other server asks
            while await lease_end() < first + 300.0:
                await asyncio.sleep(0.05)
            await two.post(CHAT, 409, **body)
            slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await slow
            await one.histories.run(lambda: None)  # behind the release
            await two.post(CHAT, **body)

    run(work())


async def told(server: Any, number: int) -> list[Any]:
    return await asyncio.to_thread(server.loop.messages, Forget, number)


def test_what_one_server_deletes_is_forgotten_by_all_before_the_name_is_served_again(
    serve: Any, postgres: str
) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            for name in ("a", "b"):
                await one.chat("hello", conversation=name)
                await two.chat("hello", "there", "more", conversation=name)
            log = two.logs()[-1]
            await one.ask("DELETE", f"{CONVERSATIONS}/b")
            assert not two.loop.messages(Forget)
            await two.chat("hello again", conversation="b")
            messages = [message for message in two.loop.log if isinstance(message, Forget | Submit)]
            forgotten, submitted = messages[-2:]
            assert isinstance(forgotten, Forget) and isinstance(submitted, Submit)
            assert (forgotten.conversation, forgotten.tokens.tolist()) == ("b", log)
            assert len(one.loop.messages(Forget)) == 1, "it has deleted it itself"
            await one.chat("hello", conversation="c")
            assert len(one.loop.messages(Forget)) == 1

    run(work())


@pytest.mark.parametrize("erasure", [Erasure.WHOLLY, Erasure.LATER])
def test_a_tombstone_is_kept_until_every_server_has_erased(
    erasure: Erasure, serve: Any, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store of all servers has refused is erased by the server that has asked."""
    monkeypatch.setattr(databases.Postgres, "lease", 0.3)

    async def tombstones(server: Any) -> int:
        return len(await server.histories.run(server.store._db.execute, "SELECT 1 FROM tombstones"))

    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            await one.chat("hello", conversation="a")
            two.loop.erasure = None  # it keeps them waiting
            await one.ask("DELETE", f"{CONVERSATIONS}/a")
            await told(two, 1)  # without a request
            (alive,) = await one.histories.run(
                one.store._db.execute, "SELECT max(alive) FROM servers"
            )
            while await one.histories.run(
                one.store._db.execute, "SELECT min(alive) FROM servers"
            ) <= [alive]:
                await asyncio.sleep(0.01)  # both have looked again
            assert await tombstones(one) == 1
            two.loop.say(Erased(erasure))
            while await tombstones(one):
                await asyncio.sleep(0.01)

    run(work())


def test_a_server_that_was_away_erases_what_was_deleted_meanwhile(postgres: str) -> None:
    whole = transcript("0", "1")
    one, two = (HistoryStore(postgres, server=name) for name in ("one", "two"))
    assert not one.is_registered() and not two.is_registered(), "they are new"
    one.register()
    two.register()
    for name in "abc":
        one.commit(Name("", name), whole, 1.0)
    two.close()
    one.delete(Name("", "a"), 1.0)
    two = HistoryStore(postgres, server="two")
    assert two.is_registered()
    two.register()
    two.keep_in_step([], two.seen)
    assert [gone.name.id for gone in two.take_expired()] == ["a"]
    two.delete(Name("", "b"), 1.0)  # and is killed before this is erased on its disk
    two.close()
    two = HistoryStore(postgres, server="two")
    assert two.is_registered()
    two.register()
    two.admit([Name("", "c")], 1.0, b"1")
    assert [gone.name.id for gone in two.take_expired()] == ["a", "b"]
    one._db.execute("UPDATE open_turns SET until = 0")
    one.keep_in_step([], one.seen)
    one.keep_in_step([], one.seen)
    assert one._db.execute("SELECT * FROM open_turns") == [], (
        "their servers have been gone for long"
    )
    two.keep_in_step([], two.seen)
    assert one._db.execute("SELECT count(*) FROM tombstones") == [(0,)]
    one._db.execute("UPDATE servers SET alive = 0 WHERE id = 'two'")
    one.keep_in_step([], one.seen)
    for call in (two.keep_in_step, two.admit):
        with pytest.raises(RequestError, match="restart it"):
            call([], 0)
    assert not two.is_registered(), "what it has on its disk is not to be used"
    for store in (one, two):
        store.close()


def test_forks_pins_lifetimes_and_quotas_are_the_same_on_all_servers(postgres: str) -> None:
    one, two = (HistoryStore(postgres, quota=2, server=name) for name in ("one", "two"))
    for store in (one, two):
        store.register()
    a, c = Name("", "a"), Name("", "c")
    one.commit(a, transcript("0", "1"), 1.0)
    two.fork(a, "b", 2.0)
    assert [conversation.id for conversation in one.page("", 10, None, True, 2.0)[0]] == ["a", "b"]
    with pytest.raises(RequestError, match="the most it may have"):
        one.create(c, 2.0)
    two.change(a, 2.0, pinned_until=9.0, history_ttl=5.0)
    assert one.get(a, 3.0).pinned_until == 9.0 and one.find(a, 100.0) is None
    one.create(c, 100.0)
    one.expire(100.0)
    two.keep_in_step([], two.seen)
    for store in (one, two):
        assert [gone.name.id for gone in store.take_expired()] == ["a"]
        store.close()
