"""Own fields and unknown fields are treated alike on every endpoint. The table names what differs,
and why."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.body_base import MOST_UNKNOWN, with_whole_pairs
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.messages import Submit
from pensieve.scheduler.types import Request

from ..fake_loop import EOS, FakeLoop, byte_tokens

TOLD = [{"role": "user", "content": "hello"}]
GENERATE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": TOLD},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": TOLD, "max_tokens": 9},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": TOLD},
    "/v1/completions/render": {"prompt": "hello"},
    "/v1/chat/completions/render": {"messages": TOLD},
    "/v1/messages/render": {"messages": TOLD, "max_tokens": 9},
    "/tokenize": {"messages": TOLD},
    "/detokenize": {"tokens": [5]},
}
WORDS = tuple(tuple(byte_tokens(word)) for word in ("ab", " ab", "c", " c"))
Effect = Callable[[Request, Any], bool]
OWN: dict[str, tuple[Any, Any, Effect]] = {
    "cache_salt": ("a", 5, lambda request, answer: request.salt == b"given:a"),
    "priority": (7, "7", lambda request, answer: request.priority == 7),
    "expect_next_s": (2.5, -1, lambda request, answer: request.expect_next_s == 2.5),
    "session_id": ("a", "", lambda request, answer: request.conversation is not None),
    "conversation_params": (
        {"conversation_id": "a"},
        "a",
        lambda request, answer: request.conversation is not None,
    ),
    "bad_words": (["ab", "c"], [" "], lambda request, answer: request.sampling.bad_words == WORDS),
    "return_sources": (True, "yes", lambda request, answer: "'recomputed': 0" in str(answer)),
    "conversation": ("a", 5, lambda request, answer: request.conversation is not None),
    # `store` needs a stream: test_hang_ups.py
    "on_disconnect": ("discard", 5, lambda request, answer: True),
    "return_token_ids": (True, 5, lambda request, answer: "'token_ids': [" in str(answer)),
}
REFUSED = {
    ("/v1/messages", "conversation"): "Anthropic's clients send the whole history",
    ("/v1/responses", "conversation"): "it must exist, as in OpenAI's API",
    ("/v1/responses", "return_token_ids"): "a response's items have no place for them",
}
UNKNOWN_HERE = {("/v1/messages", "return_token_ids"): "a message's blocks have no place for them"}
Ask = Callable[..., Any]


def posted(
    ask: Ask, path: str, settings: HTTPSettings, **fields: Any
) -> tuple[httpx.Response, list[Request]]:
    loop = FakeLoop(lambda _: [*byte_tokens("abc"), EOS])
    minimal = {**GENERATE, **OTHERS}[path]

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(path, content=json.dumps({"model": "fake", **minimal, **fields}))

    response = ask(work, loop, settings=settings)
    return response, [message.request for message in loop.messages(Submit)]


LENIENT, STRICT = HTTPSettings(), HTTPSettings(strict_fields=True)
HEADER = "x-pensieve-ignored-fields"


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("name", OWN)
def test_an_own_field_has_its_effect_or_is_refused_by_name(ask: Ask, path: str, name: str) -> None:
    value, wrong, effect = OWN[name]
    for settings in (LENIENT, STRICT):
        response, requests = posted(ask, path, settings, **{name: value})
        if (path, name) in UNKNOWN_HERE:
            named = response.headers.get(HEADER) == name or name in response.text
            assert named, (response.status_code, response.text)
            continue
        if (path, name) in REFUSED:
            assert response.status_code in (400, 404) and name in response.text
            continue
        assert response.status_code == 200, response.text
        assert effect(requests[0], response.json()) and HEADER not in response.headers
        refused, _ = posted(ask, path, settings, **{name: wrong})
        assert refused.status_code == 400 and name in refused.text
        absent, _ = posted(ask, path, settings, **{name: None})
        assert absent.status_code == 200 and HEADER not in absent.headers


@pytest.mark.parametrize("path", [*GENERATE, *OTHERS])
def test_an_unknown_field_is_named(ask: Ask, path: str) -> None:
    response, _ = posted(ask, path, LENIENT, wholly_unknown=1)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "wholly_unknown"
    refused, _ = posted(ask, path, STRICT, wholly_unknown=1)
    assert refused.status_code == 400 and "wholly_unknown" in refused.text


@pytest.mark.parametrize("path", GENERATE)
def test_a_misspelt_own_field_is_refused(ask: Ask, path: str) -> None:
    response, _ = posted(ask, path, LENIENT, cache_slat="a")
    assert response.status_code == 400 and "did you mean cache_salt?" in response.text


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("others", [15, 16, MOST_UNKNOWN - 1])
def test_a_misspelt_own_field_is_refused_behind_others(ask: Ask, path: str, others: int) -> None:
    """Only 16 ignored fields are named. With `history` ignored, a turn replaced what was stored."""
    unknown = {f"x_{at}": 1 for at in range(others)}
    response, requests = posted(ask, path, LENIENT, **unknown, histroy="server")
    assert response.status_code == 400 and "did you mean history?" in response.text
    assert not requests
    response, _ = posted(ask, path, LENIENT, **unknown)
    assert response.status_code == 200
    assert response.headers[HEADER] == ", ".join([*unknown][:16])


def test_the_comparisons_with_own_fields_are_bounded(ask: Ask) -> None:
    unknown = {f"x_{at}": 1 for at in range(MOST_UNKNOWN + 1)}
    response, _ = posted(ask, "/v1/responses", LENIENT, **unknown)
    assert response.status_code == 400 and str(MOST_UNKNOWN) in response.text


FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "a"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTIONS[0]]}},
        "required",
    ],
)
def test_a_choice_of_tools_leaves_no_field_ignored(ask: Ask, choice: Any) -> None:
    for settings in (LENIENT, STRICT):
        fields = {"tools": FUNCTIONS, "tool_choice": choice}
        response, _ = posted(ask, "/v1/chat/completions", settings, **fields)
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers


CALL = {"name": "f", "arguments": '{"a\\ud83d": "b\\ud83d"}'}  # JSON in JSON
WITH_HALVES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "hi \ud83d"}),
    ("/v1/completions", {"prompt": "x", "guided_json": '{"const": "\\udc00"}'}),
    ("/v1/completions", {"prompt": "x", "guided_json": {"const": "\udc00"}}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "\ude00\ud83d"}]},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": CALL}]},
                {"role": "tool", "tool_call_id": "1", "content": "\ud83d\ud83d\ude00\ude00"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "description": "\ud83d",
                        "parameters": {"type": "object", "properties": {"\ud83d": {}}},
                    },
                }
            ],
        },
    ),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", **CALL}, *TOLD]}),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "\ud83d"}, *TOLD]},
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "system": "\ud83d",
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "\ud83d"}}
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "\ud83d"}],
                },
            ],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "\ud83d"}]}),
    ("/tokenize", {"prompt": "\ud83d"}),
)


@pytest.mark.parametrize(("path", "body"), WITH_HALVES)
def test_half_a_surrogate_pair_does_not_end_a_session(
    ask: Ask, path: str, body: dict[str, Any]
) -> None:
    """JavaScript sends it for a character that it has cut, and clients in each later turn again."""
    sent = json.dumps({"model": "fake", **body})
    halves = re.sub(r"(?<!ud83d)\\ude00|\\ud83d(?!\\ude00)|\\udc00", r"\\ufffd", sent)
    assert halves != sent
    for settings in (LENIENT, STRICT):
        loop = FakeLoop(lambda _: [*byte_tokens("abc"), EOS])

        async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
            return [await http.post(path, content=text) for text in (sent, halves)]

        answers = ask(work, loop, settings=settings)
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        prompts = [message.request.prompt for message in loop.messages(Submit)]
        assert prompts[:1] == prompts[1:]
        if not prompts:
            assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "\ud83d"},
        {"conversation": "\ud83d"},
        {"conversation": {"id": "\ud83d"}},
        {"conversation_params": {"conversation_id": "\ud83d"}},
        {"prompt_cache_key": "\ud83d"},
        {"session_id": "\ud83d"},
    ],
)
def test_a_name_with_half_a_surrogate_pair_is_refused(ask: Ask, fields: dict[str, Any]) -> None:
    response, _ = posted(ask, "/v1/chat/completions", LENIENT, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] in fields


ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)", re.DOTALL
)
PIECES = ("\\", "\\\\", "\\ud83d", "\\uDE00", "ud83d", "\\n", "x", "\\u0041", "\\udfff")


def test_halves_of_surrogate_pairs_are_told_from_pairs_and_escaped_backslashes() -> None:
    """As by a scan of one escape after the other."""
    chance = random.Random(3)
    for _ in range(10_000):
        text = "".join(chance.choices(PIECES, k=chance.randrange(7))).encode()
        slow = ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], text)
        assert with_whole_pairs(text) == slow
