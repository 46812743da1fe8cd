"""Details that the official client reads: codes of errors, ids of requests, and fields that it adds
itself."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.errors import error_object, error_response
from pensieve.runtime.messages import Submit
from pensieve.scheduler.types import ErrorKind, RequestError

from .fake_loop import FakeLoop, ready

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_model_that_is_not_served_is_not_found(ask: Callable[..., Any]) -> None:
    async def everywhere(http: httpx.AsyncClient) -> list[httpx.Response]:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (COMPLETION, {"prompt": "x"}),
            (CHAT, {"messages": HI}),
            ("/v1/responses", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ]
        posts = [http.post(path, json={"model": "other", **body}) for path, body in bodies]
        return await asyncio.gather(*posts, http.get("/v1/models/other"))

    loop = FakeLoop()
    answers = ask(everywhere, loop)
    for response in answers:
        assert error_of(response) == (404, "model_not_found", "model")
        assert "'other'" in response.json()["error"]["message"]
    assert not loop.log


def test_one_model_is_described_as_in_the_list(ask: Callable[..., Any]) -> None:
    async def both(http: httpx.AsyncClient) -> list[Any]:
        return [(await http.get(path)).json() for path in ("/v1/models", "/v1/models/fake")]

    listed, one = ask(both)
    assert listed["data"] == [one]


def test_the_limit_of_a_response_is_blamed_by_its_own_name(ask: Callable[..., Any]) -> None:
    body = {"input": "x" * 200, "max_output_tokens": 0}
    error = ask(lambda http: http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == "max_output_tokens" and "max_output_tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": [5] * 200, "max_tokens": 32000}),
        (CHAT, {"messages": HI, "max_tokens": 10**4300 - 1}),
        (CHAT, {"messages": HI, "max_completion_tokens": 32000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32000}),
        ("/v1/messages", {"model": "fake", "messages": HI, "max_tokens": 32000}),
    ],
)
def test_a_limit_above_the_room_is_lowered_to_it(
    ask: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    loop = FakeLoop()
    answer = ask(lambda http: http.post(path, json=body), loop)
    assert answer.is_success
    (submitted,) = loop.messages(Submit)
    assert len(submitted.request.prompt) + submitted.request.max_tokens == ready().max_model_len


@pytest.mark.parametrize(
    "path", ["/ui/state", "/health", "/v1/models", "/version", "/metrics", "/none"]
)
def test_head_is_get_without_the_body(ask: Callable[..., Any], path: str) -> None:
    async def both(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        return await http.head(path), await http.get(path)

    head, get = ask(both)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_claude_code_s_first_request_is_answered(ask: Callable[..., Any]) -> None:
    assert ask(lambda http: http.head("/")).status_code == 307


def test_what_does_not_fit_the_context_has_a_code(ask: Callable[..., Any]) -> None:
    async def both(http: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = ({"prompt": [5] * 300}, {"prompt": [5] * 256, "max_tokens": 1})
        return [await http.post(COMPLETION, json=body) for body in bodies]

    answers = [error_of(response) for response in ask(both)]
    assert answers == [(400, "context_length_exceeded", "prompt")] * 2


def test_a_code_survives_the_way_between_processes() -> None:
    error = pickle.loads(
        pickle.dumps(RequestError(ErrorKind.NOT_FOUND, "gone", "model", "model_not_found"))
    )
    assert error_object(error)["error"]["code"] == error.code == "model_not_found"


def test_answers_name_their_request(ask: Callable[..., Any]) -> None:
    """The header is the id of the answer, which is that of the log's line."""
    whole = ask(lambda http: http.post(COMPLETION, json={"prompt": "x"}))
    assert whole.headers["x-request-id"] == whole.json()["id"]
    stream = ask(lambda http: http.post(COMPLETION, json={"prompt": "x", "stream": True}))
    assert f'"{stream.headers["x-request-id"]}"' in stream.text


def test_what_the_client_has_parsed_may_be_sent_back(ask: Callable[..., Any]) -> None:
    function = {"name": "weather", "arguments": "{}", "parsed_arguments": {}}
    parsed = [
        {"role": "assistant", "content": "{}", "parsed": {"a": 1}},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
            "parsed": None,
        },
    ]
    assert (
        ask(lambda http: http.post(CHAT, json={"messages": [*HI, *parsed, *HI]})).status_code == 200
    )


@pytest.mark.parametrize("kind", ErrorKind)
def test_each_kind_of_error_has_a_status_and_a_type(kind: ErrorKind) -> None:
    status, openai, anthropic = {
        ErrorKind.INVALID: (400, "invalid_request_error", "invalid_request_error"),
        ErrorKind.UNAUTHENTICATED: (401, "invalid_request_error", "authentication_error"),
        ErrorKind.NOT_FOUND: (404, "invalid_request_error", "not_found_error"),
        ErrorKind.CONFLICT: (409, "invalid_request_error", "invalid_request_error"),
        ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
        ErrorKind.TOO_MANY: (429, "rate_limit_error", "rate_limit_error"),
        ErrorKind.INTERNAL: (500, "server_error", "api_error"),
        ErrorKind.UNAVAILABLE: (503, "server_error", "overloaded_error"),
        ErrorKind.STORAGE_FULL: (507, "server_error", "api_error"),
    }[kind]
    error = RequestError(kind, "no", "prompt")
    for path, named in (("/v1/completions", openai), ("/v1/messages", anthropic)):
        answer = error_response(error, path)
        told = json.loads(bytes(answer.body))["error"]
        assert (answer.status_code, told["type"]) == (status, named)
        assert ("retry-after" in answer.headers) == (status in (429, 503))
