"""Clients that hang up while a reply to a conversation grows: `on_disconnect`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pensieve.runtime.messages import Abort, Finish
from pensieve.scheduler.types import Request

from ..odd_tokenizer import byte_by_byte
from ..served import CHAT, DONE, Served, run, serve

__all__ = ["serve"]  # a fixture

pytestmark = pytest.mark.usefixtures("histories_at")  # with both databases

TEA = "/v1/conversations/tea"
FIRST = [{"role": "user", "content": "hello"}]
KEPT = "hello wo"  # what the client has read when it hangs up


def spell_long(request: Request) -> list[int]:
    return [*byte_by_byte("hello world " * 20), DONE]


async def hang_up(server: Served, behind: int, path: str = CHAT, **body: Any) -> str:
    """Streams, and hangs up when the reply has this many tokens. Returns the text that was read;
    the server has ended its work then."""
    server.loop.pauses_behind = behind
    events: list[dict[str, Any]] = []
    gone = asyncio.Event()
    sent = json.dumps({"stream": True, **body}).encode()
    messages = iter([{"type": "http.request", "body": sent}])

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await gone.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        lines = message.get("body", b"").decode().splitlines()
        events.extend(json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        if gone.is_set() or len(read(events)) >= behind:
            gone.set()
            server.loop.go_on()

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    answering = asyncio.create_task(server.app(scope, receive, send))
    if behind == 0:
        await asyncio.to_thread(server.loop.messages, object, 1)
        gone.set()
    await asyncio.wait_for(answering, 60)
    server.loop.go_on()
    return read(events)


def read(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_partial_reply_is_stored_and_the_next_turn_continues_it(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=spell_long) as server:
            body = dict(conversation="tea", on_disconnect="store")
            shown = await hang_up(server, len(KEPT), messages=FIRST, **body)
            assert shown == KEPT
            whole = await server.ask("GET", TEA)
            assert [message["content"] for message in whole["messages"]] == ["hello", KEPT]
            assert not whole["in_flight"]
            first = server.requests[0]
            assert server.loop.confirmed == {first.id: len(KEPT)}
            assert not server.loop.messages(Abort)

            shown = await hang_up(
                server,
                len(KEPT),
                messages=[{"role": "user", "content": "more"}],
                history="server",
                **body,
            )
            second = server.requests[1]
            log = [*first.prompt, *byte_by_byte(KEPT)]
            assert second.prompt[: len(log)].tolist() == log
            whole = await server.ask("GET", TEA)
            contents = [message["content"] for message in whole["messages"]]
            assert contents == ["hello", KEPT, "more", KEPT]

    run(work())


def test_without_the_field_nothing_of_the_turn_is_stored(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=spell_long) as server:
            await server.chat("hello", conversation="tea", max_tokens=3)
            more = [{"role": "user", "content": "more"}]
            body = dict(messages=more, conversation="tea", history="server")
            for fields in ({}, {"on_disconnect": "discard"}):
                await hang_up(server, len(KEPT), **body, **fields)
                assert len((await server.ask("GET", TEA))["messages"]) == 2
            assert len(server.loop.messages(Abort, 2)) == 2

    run(work())


def test_nothing_is_stored_of_a_reply_that_has_not_begun(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=spell_long) as server:
            await server.ask("POST", "/v1/conversations", json={"id": "tea"})
            server.loop.pause()
            body = dict(messages=FIRST, conversation="tea", history="server")
            await hang_up(server, 0, on_disconnect="store", **body)
            assert (await server.ask("GET", TEA))["messages"] == []
            assert not server.loop.messages(Finish) and server.loop.messages(Abort, 1)

    run(work())


def test_a_conversation_shows_whether_a_turn_is_in_flight(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.chat("hello", conversation="tea")
            assert (await server.ask("GET", TEA))["in_flight"] is False
            server.loop.pause()
            begun = len(server.requests)
            turn = asyncio.create_task(server.chat("hello", conversation="tea"))
            while len(server.requests) == begun:
                await asyncio.sleep(0.001)
            assert (await server.ask("GET", TEA))["in_flight"] is True
            server.loop.go_on()
            await turn
            assert (await server.ask("GET", TEA))["in_flight"] is False

    run(work())


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"conversation": "tea"},
        {"stream": True, "conversation": "tea", "n": 2},
    ],
)
def test_the_field_is_refused_where_it_has_no_effect(serve: Any, fields: dict[str, Any]) -> None:
    async def work() -> None:
        async with serve() as server:
            answer = await server.post(CHAT, 400, messages=FIRST, on_disconnect="store", **fields)
            assert answer["error"]["param"] == "on_disconnect"

    run(work())
