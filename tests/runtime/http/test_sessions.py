"""Sessions: their names, their owners, their end, and the log of prompts that changed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

import pytest

from pensieve.runtime.messages import Forget
from pensieve.scheduler.types import RequestError

from ..served import run
from ..served import serve as serve  # a fixture

HEADERS = (
    "session-id",
    "x-session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "x-session-affinity",
)
HI = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "x", "store": False},
    "/v1/messages": {"model": "fake", "max_tokens": 8, "messages": HI},
}
GONE = "/v1/sessions/run%201"


async def named(server: Any, path: str, headers: dict[str, str], **fields: Any) -> str | None:
    """Returns the loop's name for the KV of the request."""
    answer = await server.http.post(path, json=BODIES[path] | fields, headers=headers)
    assert answer.is_success, answer.text
    assert "x-pensieve-ignored-fields" not in answer.headers
    return server.requests[-1].conversation


@pytest.mark.parametrize("path", BODIES)
def test_all_names_name_a_session_everywhere(serve: Any, path: str) -> None:
    """A body's name before a header's, an explicit one before an affinity."""

    async def work() -> None:
        async with serve() as server:
            ways: list[tuple[dict[str, str], dict[str, str]]] = [
                *(({header: "run 1"}, {}) for header in HEADERS),
                ({}, {"prompt_cache_key": "run 1"}),
                ({"session-id": "run 1"}, {"prompt_cache_key": "other"}),
                ({"x-session-affinity": "other"}, {"prompt_cache_key": "run 1"}),
                ({"x-session-affinity": "other", "x-dynamo-session-id": "run 1"}, {}),
            ]
            names = {await named(server, path, headers, **fields) for headers, fields in ways}
            assert len(names) == 1 and None not in names
            in_body = await named(server, path, {}, session_id="run 1")
            assert in_body == await named(
                server, path, {"session-id": "other"}, session_id="run 1", prompt_cache_key="other"
            )
            assert await named(server, path, {"session-id": ""}, prompt_cache_key="") is None
            assert not (await server.ask("GET", "/v1/conversations"))["data"]

    run(work())


def test_the_dialogues_of_a_header_s_session_are_told_apart(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            path = "/v1/chat/completions"
            headers = {"session-id": "run 1"}
            begun = await named(server, path, headers)
            more = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "y"}]
            assert await named(server, path, headers, messages=more) == begun
            agent = [{"role": "system", "content": "an agent"}, *HI]
            assert await named(server, path, headers, messages=agent) != begun
            assert await named(server, path, headers, conversation="c") == "c"

    run(work())


@pytest.mark.parametrize("header", HEADERS)
def test_a_name_that_is_too_long_is_refused(serve: Any, header: str) -> None:
    async def work() -> None:
        async with serve() as server:
            post = server.http.post
            answer = await post(
                "/v1/completions", json={"prompt": "x"}, headers={header: "s" * 1001}
            )
            assert answer.status_code == 400 and header in answer.text
            fields = {"prompt": "x", "prompt_cache_key": "s" * 1001}
            assert (
                "prompt_cache_key"
                in (await server.post("/v1/completions", 400, **fields))["error"]["message"]
            )

    run(work())


def test_the_end_of_a_session_is_its_owner_s(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            for key in ("one", "two"):
                for system in ("a", "b"):
                    messages = [{"role": "system", "content": system}, *HI]
                    headers = {"session-id": "run 1", "authorization": f"Bearer {key}"}
                    await named(server, "/v1/chat/completions", headers, messages=messages)
            names = [request.conversation for request in server.requests]
            await server.ask("DELETE", "/v1/sessions/run", 404, "one")
            assert (await server.ask("DELETE", GONE, key="one"))["deleted"]
            assert [told.conversation for told in server.loop.messages(Forget)] == names[:2]
            error = (await server.ask("DELETE", GONE, 404, "one"))["error"]
            assert error["message"] == "there is no session 'run 1'"
            await server.ask("DELETE", GONE, key="two")
            assert [told.conversation for told in server.loop.messages(Forget)] == names

    run(work())


def test_a_name_beyond_ascii_is_the_same_in_a_path(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            headers = {"session-id": "t\u00fcr/1".encode()}
            answer = await server.http.post(
                "/v1/completions", json={"prompt": "x"}, headers=headers
            )
            assert answer.is_success
            await server.ask("DELETE", "/v1/sessions/t%C3%BCr/1")

    run(work())


OPEN = "/v1/chat/completions"


def turns(system: str, *contents: str) -> list[dict[str, str]]:
    dialogue = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *dialogue]


@pytest.mark.parametrize(
    ("second", "place"),
    [
        (turns("s", "x", "a", "y", "b", "z"), None),
        (turns("other", "x", "a", "y", "b", "z"), "in message 1 (system)"),
        (turns("s", "x", "A", "y", "b", "z"), "in message 3 (assistant)"),
        (turns("s", "x"), "it ends after message 2"),
    ],
)
def test_a_prompt_that_changed_is_told_once(
    serve: Any, caplog: pytest.LogCaptureFixture, second: Any, place: str | None
) -> None:
    async def work() -> None:
        async with serve() as server:
            headers = {"session-id": "run 1"}
            first = turns("s", "x", "a", "y")
            for messages in (first, second, first, second):
                await named(server, OPEN, headers, messages=messages)
                if place is None and messages is second:
                    break
            for messages in (first, second):  # without a name
                await named(server, OPEN, {}, messages=messages)

    with caplog.at_level(logging.WARNING):
        run(work())
    told = [line.message for line in caplog.records if "changed" in line.message]
    if place is None:
        assert not told
    else:
        (line,) = told
        assert line.startswith("the prompt of session 'run 1' changed at token ")
        assert place in line


def test_helpers_of_a_session_are_no_change(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serve() as server:
            for messages in (
                turns("title", "x"),
                turns("s", "x"),
                turns("helper", "do it"),
                turns("s", "x", "a", "y"),
            ):
                await named(server, OPEN, {"session-id": "run 1"}, messages=messages)

    with caplog.at_level(logging.WARNING):
        run(work())
    assert "changed" not in caplog.text


def test_the_kv_of_a_request_in_flight_goes_at_its_end(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            sessions = server.histories.sessions
            again = ExitStack()
            with ExitStack() as held:
                sessions.open(("", "s"), "kv", held)
                await sessions.end(("", "s"))
                assert len(server.loop.messages(Forget)) == 1
            assert len(server.loop.messages(Forget, at_least=2)) == 2
            with ExitStack() as held:
                sessions.open(("", "s"), "kv", held)
                await sessions.end(("", "s"))
                sessions.open(("", "s"), "kv", again)  # the session is used again
            again.close()
            await asyncio.sleep(0)
            assert len(server.loop.messages(Forget)) == 3

    run(work())


def test_a_stored_response_belongs_to_its_session(serve: Any) -> None:
    """The end of the session drops the KV. The response stays."""

    async def work() -> None:
        async with serve() as server:
            headers = {"session-id": "run 1"}
            answer = await server.http.post("/v1/responses", json={"input": "x"}, headers=headers)
            stored = answer.json()["id"]
            assert (await server.ask("DELETE", GONE))["deleted"]
            told = [told.conversation for told in server.loop.messages(Forget)]
            assert told == [server.requests[-1].conversation]
            await server.ask("GET", f"/v1/responses/{stored}")

    run(work())


@pytest.mark.parametrize("kind", ["session", "response", "branch", "conversation"])
def test_a_conversation_never_has_the_name_of_another_kind(serve: Any, kind: str) -> None:
    async def work() -> None:
        async with serve() as server:
            path = "/v1/completions"
            await named(server, path, {}, session_id="x")
            answer = await server.http.post("/v1/responses", json={"input": "x"})
            stored = answer.json()["id"]
            for name in (f"{kind}::x", f"{kind}::{stored}", f"{kind}::{kind}::x", "x"):
                await named(server, path, {}, conversation=name)
            names = [request.conversation for request in server.requests]
            assert len(set(names)) == len(names)

    run(work())


def test_an_owner_with_many_sessions_loses_only_its_own(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve.runtime.conversations.sessions.MOST_DIALOGUES", 4)

    async def work() -> None:
        async with serve() as server:
            sessions = server.histories.sessions
            with ExitStack() as held:
                sessions.open(("one", "s"), "kv", held)
                for number in range(9):
                    sessions.open(("two", f"s{number}"), f"kv{number}", held)
            await sessions.end(("one", "s"))
            for number in range(6, 9):
                await sessions.end(("two", f"s{number}"))
            with pytest.raises(RequestError, match="no session 's5'"):
                await sessions.end(("two", "s5"))

    run(work())
