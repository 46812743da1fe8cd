"""Two servers with one PostgreSQL: each goes on from the turns of the other, and no turn disturbs another one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ..served import CHAT, run, serve

__all__ = ["serve"]  # a fixture

CONVERSATIONS = "/v1/conversations"


async def until_asked(server: Any, requests: int) -> None:
    while len(server.requests) < requests:
        await asyncio.sleep(0.005)


def test_a_conversation_goes_on_at_another_server(serve: Any, postgres: str) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            reply = await one.chat("hello", conversation="a")
            await two.chat("more", conversation="a", history="server")
            (log,) = one.logs()
            assert two.requests[0].prompt[: len(log)].tolist() == log, "with the ids that were generated"
            whole = await one.ask("GET", f"{CONVERSATIONS}/a")
            assert [message["content"] for message in whole["messages"]][:3] == ["hello", reply, "more"]
            assert len((await two.ask("GET", CONVERSATIONS))["data"]) == 1
            response = await one.post("/v1/responses", input="hello")
            await two.post("/v1/responses", input="more", previous_response_id=response["id"])
            await two.post(CONVERSATIONS, 409, id="a")

    run(work())


def test_one_turn_of_a_server_history_is_in_flight_on_all_servers(serve: Any, postgres: str) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            await one.chat("hello", conversation="a")
            one.loop.pause()
            body = dict(messages=[{"role": "user", "content": "x"}], conversation="a", history="server")
            slow = asyncio.create_task(one.post(CHAT, **body))
            await until_asked(one, 2)
            error = (await two.post(CHAT, 409, **body, stream=True))["error"]
            assert "in flight" in error["message"] and not two.requests, "before anything is computed"
            branch = await two.chat("hello", conversation="a")
            one.loop.go_on()
            await slow
            contents = [m["content"] for m in (await two.ask("GET", f"{CONVERSATIONS}/a"))["messages"]]
            assert contents[2] == "x" and len(contents) == 4 and branch
            await two.post(CHAT, **body)

    run(work())


def test_a_lease_is_renewed_while_its_turn_runs(serve: Any, postgres: str) -> None:
    async def work() -> None:
        async with serve(postgres) as one, serve(postgres) as two:
            one.store.lease = 1.0
            await one.chat("hello", conversation="a")
            one.loop.pause()
            body = dict(messages=[{"role": "user", "content": "x"}], conversation="a", history="server")
            slow = asyncio.create_task(one.post(CHAT, **body))
            await until_asked(one, 2)

            async def lease_end() -> float:
                return float((await one.histories.run(one.store._db.execute, "SELECT until FROM open_turns"))[0][0])

            first = await lease_end()
            while await lease_end() < first + 1.0:  # longer than the lease
                await asyncio.sleep(0.05)
            await two.post(CHAT, 409, **body)
            slow.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await slow
            await one.histories.run(lambda: None)  # behind the release
            await two.post(CHAT, **body)

    run(work())
