"""Anthropic's Messages API over a simulated loop: forms, streams, errors, the model's input."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest

from pensieve.runtime.frontend.errors import RETRY_SECONDS
from pensieve.runtime.http.messages import BILLING
from pensieve.runtime.messages import Keep, Submit
from pensieve.scheduler.types import Request

from ..fake_loop import FakeLoop, say
from ..odd_tokenizer import byte_by_byte
from ..served import DONE, Served, run, serve

__all__ = ["serve"]  # a fixture

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
USE = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def says(text: str) -> Callable[[Request], list[int]]:
    return lambda _: [*byte_by_byte(text), DONE]


def body(*contents: Any, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return {"model": "fake", "max_tokens": 200, "messages": messages, **fields}


async def send(
    server: Served, *contents: Any, status: int = 200, key: str | None = None, **fields: Any
) -> Any:
    return await server.post(MESSAGES, status, key, **body(*contents, **fields))


async def stream(server: Served, *contents: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events; each has its kind as its name."""
    response = await server.http.post(MESSAGES, json=body(*contents, stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def read(server: Served) -> str:
    """The text of the last request's prompt."""
    tokens = server.requests[-1].prompt.tolist()
    return str((await server.post("/detokenize", tokens=tokens))["prompt"])


def test_a_whole_message(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            answer = await send(server, "hello")
            prompt = len(server.requests[0].prompt)
            assert answer.pop("id").startswith("msg_")
            assert answer == {
                "type": "message",
                "role": "assistant",
                "model": "fake",
                "content": [{"type": "text", "text": f"hello world {prompt}"}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {
                    "input_tokens": 1,
                    "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": prompt - 1,
                    "output_tokens": len(byte_by_byte(f"hello world {prompt}")) + 1,
                },
            }
            assert await server.post(COUNT, **{**body("hello"), "max_tokens": None}) == {
                "input_tokens": prompt
            }

    run(work())


def test_a_streamed_message(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            events = await stream(server, "hello")
            kinds = [event["type"] for event in events]
            assert kinds[:3] == ["message_start", "ping", "content_block_start"]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert set(kinds[3:-3]) == {"content_block_delta"}
            whole = await send(server, "hello")
            assert events[2] == {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            }
            assert (
                "".join(event["delta"]["text"] for event in events[3:-3])
                == whole["content"][0]["text"]
            )
            start = events[0]["message"]
            assert (start["content"], start["stop_reason"], start["role"]) == (
                [],
                None,
                "assistant",
            )
            first = start["usage"]["output_tokens"]
            assert first in (1, 2)  # steps in the first event
            assert start["usage"] == {**whole["usage"], "output_tokens": first}
            assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
            assert events[-2]["usage"] == whole["usage"]

    run(work())


def test_a_tool_is_used(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=says(f"Let me see.\n{CALL}\n{CALL}")) as server:
            answer = await send(server, "x", tools=[WEATHER])
            text, *uses = answer["content"]
            assert (
                text == {"type": "text", "text": "Let me see."}
                and answer["stop_reason"] == "tool_use"
            )
            assert len({use.pop("id") for use in uses}) == 2 and uses == [USE, USE]
            events = await stream(server, "x", tools=[WEATHER])
            starts = [
                event["content_block"] for event in events if event["type"] == "content_block_start"
            ]
            assert [block["type"] for block in starts] == ["text", "tool_use", "tool_use"]
            assert starts[1]["input"] == {} and starts[1]["name"] == "weather"
            indices = [event["index"] for event in events if event["type"] == "content_block_stop"]
            assert indices == [0, 1, 2]
            (part,) = [
                event["delta"] for event in events if event.get("index") == 1 and "delta" in event
            ]
            assert (
                part["type"] == "input_json_delta"
                and json.loads(part["partial_json"]) == USE["input"]
            )
            assert events[-2]["delta"]["stop_reason"] == "tool_use"
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            assert (
                len((await send(server, "x", tools=[WEATHER], tool_choice=choice))["content"]) == 2
            )
            answer = await send(server, "x", tools=[WEATHER], tool_choice={"type": "none"})
            assert CALL in answer["content"][0]["text"] and answer["stop_reason"] == "end_turn"

    run(work())


def test_text_behind_a_tool_call_is_a_block_of_its_own(serve: Any) -> None:
    """When the blocks are sent back, they equal the reply: no part is tokenized again."""

    async def work() -> None:
        async with serve(answers=says(f"One.{CALL}Two.")) as server:
            events = await stream(server, "x", tools=[WEATHER])
            blocks: list[dict[str, Any]] = []
            for event in events:
                if event["type"] == "content_block_start":
                    blocks.append(event["content_block"])
                elif event["type"] == "content_block_delta" and "text" in event["delta"]:
                    blocks[-1]["text"] += event["delta"]["text"]
                elif event["type"] == "content_block_delta":
                    blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
            assert [block["type"] for block in blocks] == ["text", "tool_use", "text"]
            result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "sunny"}
            await send(server, "x", blocks, [result], tools=[WEATHER])
            assert (await read(server)).startswith(
                "<|turn|>user\nx<|done|>\n<|turn|>assistant\nOne.Two.<tool_call>"
            )

    run(work())


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_forced(ask: Callable[..., Any], choice: dict[str, Any]) -> None:
    loop = FakeLoop(say(CALL))
    request = body("x", tools=[WEATHER], tool_choice=choice)
    answer = ask(lambda http: http.post(MESSAGES, json=request), loop).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    (submitted,) = loop.messages(Submit)
    assert submitted.request.sampling.grammar  # type: ignore[attr-defined]


def test_why_a_reply_ends(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=says("one two three")) as server:
            answer = await send(server, "x", stop_sequences=["two"])
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
            assert answer["content"][0]["text"] == "one "
            answer = await send(server, "x", max_tokens=3)
            assert (answer["stop_reason"], answer["content"][0]["text"]) == ("max_tokens", "one")
            context = 2000
            long = "y" * (context - len(server.requests[-1].prompt) - 3)
            answer = await send(server, "x" + long, max_tokens=32000)  # as agents ask for
            assert answer["stop_reason"] == "model_context_window_exceeded"
            assert answer["usage"]["output_tokens"] == 3
            error = await send(server, "x" + long * 2, status=400)
            assert "prompt is too long" in error["error"]["message"]

    run(work())


def test_what_the_model_reads(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            kept = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
            blocks = [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "text", "text": "I look."},
                {**USE, "id": "t1"},
                {**USE, "id": "t2", **kept},
            ]
            result = [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]
            results = [
                {"type": "tool_result", "tool_use_id": "t1", "content": result, **kept},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "And now"},
                {"type": "text", "text": "go on.", **kept},
            ]
            billing = {"type": "text", "text": f"{BILLING} cc_version=2.1; cch=1a2b3;"}
            system = [
                billing,
                {"type": "text", "text": "Be"},
                {"type": "text", "text": "brief.", **kept},
            ]
            messages = body("x", blocks, results)["messages"]
            messages.append({"role": "system", "content": "Hurry."})
            await server.post(
                MESSAGES, **body(system=system, messages=messages, tools=[{**WEATHER, **kept}])
            )
            call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            assert await read(server) == (
                "<|turn|>system\nBe\nbrief.<|done|>\n<|turn|>user\nx<|done|>\n"
                f"<|turn|>assistant\nI look.{call}{call}<|done|>\n"
                "<|turn|>tool\nsunny\nwarm<|done|>\n<|turn|>tool\n<|done|>\n"
                "<|turn|>user\nAnd now\ngo "
                "on.<|done|>\n<|turn|>system\nHurry.<|done|>\n<|turn|>assistant\n"
            )
            await send(server, "x", system=f"{BILLING} cch=1;\nBe brief.")
            assert (await read(server)).startswith("<|turn|>system\nBe brief.<|done|>")
            await send(server, "x", system=[billing])
            assert (await read(server)).startswith("<|turn|>user")

    run(work())


def test_thinking_is_left_out_of_what_the_model_reads(serve: Any) -> None:
    """With `--strict-fields` too: no part of these blocks is an unknown field."""

    async def work() -> None:
        async with serve(strict=True) as server:
            thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
            redacted = {"type": "redacted_thinking", "data": "d"}
            await send(server, "x", [thinking, redacted, {"type": "text", "text": "Yes."}], "y")
            with_thinking = await read(server)
            await send(server, "x", "Yes.", "y")
            assert await read(server) == with_thinking
            await send(server, "x", [redacted], "y")
            await send(server, "x", "", "y")
            alone, empty = server.requests[-2:]
            assert alone.prompt == empty.prompt

    run(work())


def test_images_that_tools_return_do_not_end_a_session(serve: Any) -> None:
    """Claude Code sends them in every later turn: those in a result, and a document beside it."""

    async def work() -> None:
        async with serve() as server:
            document = {"type": "document", "source": {"type": "base64", "data": "JVBERg=="}}
            results = [
                {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]},
                document,
            ]
            turn = ("x", [{**USE, "id": "t1"}], results)
            answer = await server.http.post(MESSAGES, json=body(*turn, "ok", "go on"))
            assert answer.status_code == 200, answer.text
            named = answer.headers["x-pensieve-ignored-fields"].split(", ")
            assert sorted(named) == ["tool_result.document", "tool_result.image"]
            assert (
                "<|turn|>tool\n[image left out: this model reads text only]<|done|>\n"
                "<|turn|>user\n[document left out: this model reads text only]<|done|>\n"
            ) in await read(server)
            refused = await send(server, *turn[:-1], [IMAGE], status=400)
            assert "image blocks" in refused["error"]["message"]
        async with serve(strict=True) as server:
            refused = await send(server, *turn, status=400)
            assert "tool_result.document is not supported" in refused["error"]["message"]

    run(work())


def test_a_history_of_another_provider_goes_on(serve: Any) -> None:
    """Tools that Anthropic's servers ran are told as calls and their results."""
    page = {"type": "web_search_result", "title": "Tea", "url": "http://t"}
    reply = [
        {"type": "mcp_tool_listing", "mcp_server_name": "docs", "tools": []},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "tea"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [{**page, "encrypted_content": "Z", "page_age": None}],
        },
        {"type": "text", "text": "A leaf."},
        {
            "type": "mcp_tool_use",
            "id": "m1",
            "name": "find",
            "server_name": "docs",
            "input": {},
        },
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m1",
            "is_error": False,
            "content": [{"type": "text", "text": "green"}],
        },
        {"type": "compaction", "content": "We spoke of tea."},
        {"type": "compaction", "content": None, "encrypted_content": "Z"},
        {**USE, "id": "t1"},
    ]
    hit = {"type": "search_result", "source": "s", "title": "t"}
    tool = {"type": "tool_reference", "tool_name": "brew"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{**hit, "content": [{"type": "text", "text": "a"}]}, tool],
    }
    last = [result, {"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "y"}]

    async def work() -> None:
        async with serve() as server:
            answer = await server.http.post(MESSAGES, json=body("x", reply, last))
            assert answer.status_code == 200, answer.text
            assert set(answer.headers["x-pensieve-ignored-fields"].split(", ")) == {
                "messages.compaction",
                "messages.mcp_tool_listing",
                "tool_result.container_upload",
                "web_search_tool_result.encrypted_content",
            }
            search = '{"name": "web_search", "arguments": {"query": "tea"}}'
            find = '{"name": "docs__find", "arguments": {}}'
            hits = f"{json.dumps({**hit, 'content': ['a']})}\n{json.dumps(tool)}"
            assert await read(server) == (
                "<|turn|>user\nx<|done|>\n"
                f"<|turn|>assistant\n<tool_call>\n{search}\n</tool_call><|done|>\n"
                f"<|turn|>tool\n{json.dumps([page])}<|done|>\n"
                f"<|turn|>assistant\nA leaf.<tool_call>\n{find}\n</tool_call><|done|>\n"
                "<|turn|>tool\ngreen<|done|>\n"
                f"<|turn|>assistant\nWe spoke of tea.{CALL}<|done|>\n"
                f"<|turn|>tool\n{hits}<|done|>\n"
                "<|turn|>user\n[file left out: this model reads text only]\ny<|done|>\n"
                "<|turn|>assistant\n"
            )
            upload = [{"type": "container_upload", "file_id": "f"}]
            answer = await server.http.post(MESSAGES, json=body(upload))
            assert answer.headers["x-pensieve-ignored-fields"] == "messages.container_upload"
            refused = await send(server, "x", [result], "y", status=400)
            assert "tool_result blocks" in refused["error"]["message"]
        async with serve(strict=True) as server:
            refused = await send(server, "x", reply, last, status=400)
            assert "messages.mcp_tool_listing" in refused["error"]["message"]
            await send(server, "x", reply[5:7], "y")

    run(work())


def test_a_reply_sent_back_keeps_its_tokens(serve: Any) -> None:
    """The stored ids stand for its text, though tokenising that would give others."""

    async def work() -> None:
        async with serve(answers=says(f"hello world{CALL}")) as server:
            first = await send(server, "x", tools=[WEATHER], system="s")
            result = {
                "type": "tool_result",
                "tool_use_id": first["content"][1]["id"],
                "content": "sunny",
            }
            await send(server, "x", first["content"], [result], tools=[WEATHER], system="s")
            log = [*server.requests[0].prompt, *byte_by_byte(f"hello world{CALL}")]
            assert server.requests[1].prompt[: len(log)].tolist() == log

    run(work())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.user.content: image blocks",
        ),
        ({"messages": [{"role": "user", "content": [{**USE, "id": "a"}]}]}, "tool_use blocks"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{**USE, "id": "a"}]},
                ]
            },
            "last message",
        ),
        ({"system": [IMAGE]}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools of type web_search_2025",
        ),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
        ({"container": "c"}, "container"),
        ({"conversation": "c"}, "conversation is not supported by this endpoint"),
        ({"history": "server"}, "history is not supported by this endpoint"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    serve: Any, fields: dict[str, Any], what: str
) -> None:
    async def work() -> None:
        async with serve() as server:
            answer = await send(server, "x", status=400, **fields)
            assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
            assert what in answer["error"]["message"]
            assert not server.requests

    run(work())


def test_errors_have_anthropics_form(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one",), queue=0) as server:
            for path, limit in ((MESSAGES, 9), (COUNT, None)):
                refused = await server.post(path, 401, "two", **body("x", max_tokens=limit))
                assert refused["error"]["type"] == "authentication_error"
                refused = await server.post(
                    path, 404, "one", **body("x", max_tokens=limit, model="claude-opus")
                )
                assert (
                    refused["error"]["type"] == "not_found_error"
                    and "fake" in refused["error"]["message"]
                )
            assert (await server.ask("GET", f"{MESSAGES}/x", 404, "one"))["error"][
                "type"
            ] == "not_found_error"
            assert (await server.ask("GET", MESSAGES, 405, "one"))["error"][
                "type"
            ] == "invalid_request_error"
            full = await send(server, "x", status=429, key="one")
            assert full["error"] == {"type": "rate_limit_error", "message": "the queue is full"}
            long = await server.ask("POST", MESSAGES, 413, "one", content=b" " * (33 * 1024**2))
            assert long["error"]["type"] == "request_too_large"
            other = await server.post(
                "/v1/chat/completions", 404, "one", model="x", messages=body("x")["messages"]
            )
            assert other["error"]["code"] == "model_not_found"  # OpenAI's form elsewhere

    run(work())


def test_an_engine_that_ends_is_overloaded_or_broken(serve: Any) -> None:
    async def work() -> None:
        async with serve(dies_with=1) as server:
            events = await stream(server, "x")
            assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
            assert events[-1]["error"]["type"] == "api_error"
        async with serve() as server:
            server.loop.close()
            await server.closed.wait()
            response = await server.http.post(MESSAGES, json=body("x"))
            assert response.status_code == 503 and response.headers["retry-after"] == str(
                RETRY_SECONDS
            )
            assert response.json()["error"]["type"] == "overloaded_error"

    run(work())


def test_a_key_may_come_as_x_api_key(serve: Any) -> None:
    """On all paths; an agent may also send a Bearer token that is not one of the server's keys."""

    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            for headers in (
                {"x-api-key": "two"},
                {"x-api-key": "two", "authorization": "Bearer none"},
            ):
                response: httpx.Response = await server.http.get("/v1/models", headers=headers)
                assert response.status_code == 200
            assert (
                await server.http.get("/v1/models", headers={"x-api-key": "three"})
            ).status_code == 401
            await server.http.post(MESSAGES, json=body("x"), headers={"x-api-key": "one"})
            await server.post("/v1/chat/completions", 200, "one", messages=body("x")["messages"])
            first, second = server.requests
            assert first.owner == second.owner and first.salt == second.salt

    run(work())


def test_models_have_anthropics_form_for_its_clients(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            headers = {"anthropic-version": "2023-06-01"}
            page = (await server.http.get("/v1/models", headers=headers)).json()
            (model,) = page.pop("data")
            assert page == {"first_id": "fake", "last_id": "fake", "has_more": False}
            assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
            assert anthropic.types.ModelInfo.model_validate(model).created_at.tzinfo is not None
            one = await server.http.get("/v1/models/fake", headers=headers)
            assert one.json() == model
            none = await server.http.get("/v1/models/nope", headers=headers)
            assert none.status_code == 404 and none.json()["type"] == "error"
            assert none.json()["error"]["type"] == "not_found_error"
            assert (await server.ask("GET", "/v1/models/nope", 404)).keys() == {"error"}
            plain = await server.ask("GET", "/v1/models")
            assert plain.keys() == {"object", "data"}
            assert plain["data"][0]["object"] == "model"

    run(work())


CLAUDE = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "run 1"})
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-session-id": "run 1"}, {"metadata": {"user_id": "a name"}}),
        ({"x-claude-code-session-id": "run 1"}, {}),
        ({}, {"metadata": {"user_id": CLAUDE}}),
        ({}, {"metadata": {"user_id": "user_0a_account__session_run 1"}}),
    ],
)
def test_the_dialogues_of_a_session_are_told_apart(
    serve: Any, headers: dict[str, str], fields: Any
) -> None:
    """The loop knows each as a conversation; the store does not know them."""

    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            for key, contents, system in (
                ("one", ("x",), "s"),
                ("one", ("x", "hello", "y"), "s"),  # goes on
                ("one", ("x",), "a subagent's"),
                ("one", ("z",), "s"),
                ("two", ("x",), "s"),
            ):
                sent = body(*contents, system=system, **fields)
                answer = await server.http.post(
                    MESSAGES, json=sent, headers={**headers, "x-api-key": key}
                )
                assert answer.status_code == 200
            names = [request.conversation for request in server.requests]
            assert names[0] == names[1] and len({*names}) == 4 and None not in names
            other = {"x-session-id": "run 2", "x-api-key": "one"}
            await server.http.post(MESSAGES, json=body("x", system="s"), headers=other)
            assert server.requests[-1].conversation not in names
            assert not (await server.ask("GET", "/v1/conversations", key="one"))["data"]

    run(work())


def left(tokens: int) -> str:
    return f"<total_tokens>{tokens} tokens left</total_tokens>"


def test_the_count_of_remaining_tokens_is_no_part_of_the_prompt(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In system texts only, and only this element; said once a session."""

    async def work() -> None:
        async with serve() as server:
            for session, count in (("run 1", 1000), ("run 1", 900), ("run 2", 800)):
                system = {"role": "system", "content": left(count)}
                sent = body("x", system=f"s\n{left(count)}")
                sent["messages"] = [*sent["messages"], system]
                headers = {"x-session-id": session}
                assert (await server.http.post(MESSAGES, json=sent, headers=headers)).is_success
            first, *others = (request.prompt for request in server.requests)
            assert others == [first, first]
            counting = {"model": "fake", "messages": sent["messages"], "system": sent["system"]}
            counted = await server.post(f"{MESSAGES}/count_tokens", **counting)
            assert counted["input_tokens"] == len(first)
            for kept in (left(7), f"{left(7)[:-1]} >"):
                await send(server, kept)
                assert len(server.requests[-1].prompt) > len(first)
            await send(server, "x", system="<total_tokens>many tokens left</total_tokens>")
            assert len(server.requests[-1].prompt) > len(first)

    with caplog.at_level(logging.INFO):
        run(work())
    told = [line.message for line in caplog.records if "remaining tokens" in line.message]
    assert [line.split(":")[0] for line in told] == ["session 'run 1'", "session 'run 2'"]


def test_an_option_keeps_the_count_of_remaining_tokens(serve: Any) -> None:
    async def work() -> None:
        async with serve(keep_tokens_left=True) as server:
            counting = {"model": "fake", "messages": body("x")["messages"], "system": left(7)}
            counted = await server.post(f"{MESSAGES}/count_tokens", **counting)
            await send(server, "x", system=left(7))
            await send(server, "x")
            kept, without = (len(request.prompt) for request in server.requests)
            assert counted["input_tokens"] == kept > without

    run(work())


def test_nothing_but_the_count_of_remaining_tokens_is_refused(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            sent = body("x") | {"messages": [{"role": "system", "content": left(5)}]}
            await server.post(MESSAGES, 400, **sent)

    run(work())


def test_without_a_session_a_message_has_no_conversation(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for user in ("a name", "[]", '{"session_id": 1}', "_session_", "[" * 100_000):
                await send(server, "x", metadata={"user_id": user})
            assert {request.conversation for request in server.requests} == {None}
            assert not server.loop.messages(Keep)

    run(work())


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"cache_control": MARK["cache_control"]}, 300),
        ({"system": [{"type": "text", "text": "s", **MARK}]}, 300),
        ({"system": [{"type": "text", "text": left(7), **MARK}]}, 300),
        ({"tools": [{**WEATHER, **MARK}]}, 300),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **MARK}]}]}, 300),
        (
            {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "tools": [{**WEATHER, **MARK}]},
            3600,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": [{**USE, "id": "t1"}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "read"},
                            {**IMAGE, **MARK},
                        ],
                    },
                ]
            },
            300,
        ),
    ],
)
def test_a_marker_keeps_the_kv_of_the_dialogue(
    serve: Any, fields: dict[str, Any], seconds: float
) -> None:
    """Behind its turn, and whether or not the client names a session."""

    async def work() -> None:
        async with serve() as server:
            await send(server, "x", **fields)
            await stream(server, "x", **fields)
            first, second = server.loop.messages(Keep, at_least=2)
            assert first == second == Keep(server.requests[0].conversation, None, seconds)
            await send(server, "x", "hello", "y")  # without a marker
            assert len(server.loop.messages(Keep)) == 2

    run(work())


def test_a_session_that_cannot_be_named_is_none(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for user in ('{"session_id": "\\ud800"}', "_session_" + "n" * 5000):
                await send(server, "hello", metadata={"user_id": user})
                assert server.requests[-1].conversation is None

    run(work())
