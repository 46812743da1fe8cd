"""The requests that may outgrow the context, the answers to the others, and the report of it in a
reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .served import CHAT, run, serve

__all__ = ["serve"]  # a fixture

COMPLETION, RESPONSES, CONVERSATIONS = "/v1/completions", "/v1/responses", "/v1/conversations"
LONG = [5] * 2500  # the context holds 2000 tokens


def test_a_conversation_may_overflow_and_others_may_not(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for named, truncation, status in (
                ({}, None, 400),
                ({}, "disabled", 400),
                ({}, "auto", 200),
                ({"conversation": "a"}, None, 200),
                ({"conversation": "b"}, "disabled", 400),
                ({"conversation": "c"}, "auto", 200),
            ):
                body = named if truncation is None else {**named, "truncation": truncation}
                answer = await server.post(COMPLETION, status, prompt=LONG, max_tokens=3, **body)
                if status == 400:
                    assert answer["error"]["code"] == "context_length_exceeded"
                else:
                    details = answer["usage"]["prompt_tokens_details"]
                    assert (answer["usage"]["prompt_tokens"], details["truncated_tokens"]) == (
                        2500,
                        500,
                    )
                    assert server.requests[-1].truncate
            await server.post(COMPLETION, 400, prompt=LONG, truncation="always")

    run(work())


def test_a_reply_that_saw_everything_says_nothing(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            answer = await server.post(COMPLETION, prompt=[5] * 20, max_tokens=3, truncation="auto")
            assert "truncated_tokens" not in answer["usage"]["prompt_tokens_details"]

    run(work())


def test_a_streams_usage_says_it_too(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            options = {"include_usage": True}
            body = dict(
                prompt=LONG, max_tokens=3, truncation="auto", stream=True, stream_options=options
            )
            response = await server.http.post(COMPLETION, json=body)
            last = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))
            assert last["usage"]["prompt_tokens_details"]["truncated_tokens"] == 500

    run(work())


@pytest.mark.parametrize("limit", [None, 2000, 2001])
def test_a_reply_is_never_longer_than_a_context(serve: Any, limit: int | None) -> None:
    async def work() -> None:
        async with serve() as server:
            messages = [{"role": "user", "content": "hello"}]
            await server.post(CHAT, messages=messages, max_tokens=limit, conversation="a")
            assert [request.max_tokens for request in server.requests] == [2000]

    run(work())


def test_a_response_says_what_applies_to_it(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="talk")
            for body, says in (
                ({}, "disabled"),
                ({"truncation": "auto"}, "auto"),
                ({"conversation": "talk"}, "auto"),
                ({"conversation": "talk", "truncation": "disabled"}, "disabled"),
            ):
                response = await server.post(RESPONSES, input="hello", **body)
                assert response["truncation"] == says
                assert server.requests[-1].truncate == (says == "auto")

    run(work())
