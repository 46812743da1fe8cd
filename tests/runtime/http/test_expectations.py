"""Behaviour that clients of OpenAI's and vLLM's servers depend on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.bodies import CompletionBody, parse
from pensieve.runtime.http.request_body import MOST_LOGGED
from pensieve.runtime.http.settings import HTTPSettings, key_digest
from pensieve.runtime.messages import Submit

from ..fake_loop import FIRST_BYTE, FakeLoop
from ..served import serve

__all__ = ["serve"]  # a fixture

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
IGNORED = "x-pensieve-ignored-fields"


def post(path: str, **body: Any) -> Callable[[httpx.AsyncClient], Any]:
    return lambda http: http.post(path, json=body)


def test_the_root_leads_to_the_page_and_the_version_is_told(ask: Callable[..., Any]) -> None:
    async def look(http: httpx.AsyncClient) -> tuple[httpx.Response, Any, httpx.Response]:
        return (
            await http.get("/", follow_redirects=True),
            (await http.get("/version")).json(),
            await http.post("/ping"),
        )

    page, told, ping = ask(look)
    assert (
        page.is_success
        and page.url.path == "/ui"
        and page.headers["content-type"].startswith("text/html")
    )
    assert told == {"version": version("pensieve")} and ping.status_code == 200


# -- refusals


def test_a_refusal_is_counted_and_logged_without_the_text_of_the_request(
    ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def refused(http: httpx.AsyncClient) -> str:
        await http.post(CHAT, json={"messages": [{"role": "secret", "content": "secret"}]})
        await http.post(COMPLETION, json={"prompt": "x", "guided_grammar": "secret"})
        await http.post("/chat/completions?secret", json={"messages": HI})
        await http.get("/v1/models/tea", headers={"authorization": "Bearer secret"})
        return (await http.get("/metrics")).text

    settings = HTTPSettings(api_keys=(key_digest("secret"),))
    with caplog.at_level(logging.INFO, "pensieve.runtime"):
        counts = ask(refused)
        ask(refused, settings=settings)
    lines = [record.fields for record in caplog.records if record.msg == "refused"]  # type: ignore[attr-defined]
    assert [line["status"] for line in lines] == [400, 400, 404, 404, 401, 401, 401, 404]
    assert lines[0]["path"] == CHAT and lines[0]["reason"].startswith("messages.0.role: ")
    assert lines[1]["reason"] == "guided_grammar cannot be followed"
    assert "secret" not in str(lines)
    assert 'pensieve:client_errors_total{status="400"} 2.0' in counts
    assert 'pensieve:client_errors_total{status="404"} 2.0' in counts


# -- unknown fields


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(ask: Callable[..., Any], stream: bool) -> None:
    message = {"role": "user", "content": "hi", "mood": "glad"}
    body = {
        "messages": [message, message],
        "stream": stream,
        "temprature": 0.3,
        "stream_usage": None,
    }
    # a tool's unknown fields are for the chat template
    tools = [{"type": "function", "function": {"name": "f", "lazy": True}}]
    answer = ask(post(CHAT, **body, tools=tools))
    assert answer.is_success and answer.headers[IGNORED].split(", ") == ["temprature", "mood"]
    assert IGNORED not in ask(post(CHAT, messages=HI, stream=stream)).headers


def test_refusals_name_ignored_fields_too(ask: Callable[..., Any]) -> None:
    answer = ask(post(COMPLETION, prompt="x", temprature=0.3, n=0))
    assert answer.status_code == 400 and answer.headers[IGNORED] == "temprature"


def test_the_header_is_short_and_plain_for_any_names(ask: Callable[..., Any]) -> None:
    odd = {"a\r\nset-cookie: b": 1, "\u96ea,": 1, "n" * 1000: 1}
    many = {f"field {number}": 1 for number in range(1000)}
    assert (
        ask(post(COMPLETION, prompt="x", **odd)).headers[IGNORED]
        == f"a__set-cookie__b, __, {'n' * 64}"
    )
    named = ask(post(COMPLETION, prompt="x", **many)).headers[IGNORED].split(", ")
    assert named == [f"field_{number}" for number in range(16)]


def test_an_ignored_field_is_logged_once_and_not_for_ever_more_of_them(
    ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def ask_often(http: httpx.AsyncClient) -> None:
        for number in (0, 0, *range(MOST_LOGGED + 10)):
            await http.post("/tokenize", json={"prompt": "x", f"field-{number}": 1})

    with caplog.at_level(logging.WARNING, "pensieve.runtime.http"):
        ask(ask_often)
    assert (
        len(caplog.messages) == MOST_LOGGED
        and sum("field-0 " in message for message in caplog.messages) == 1
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("converation", "conversation"),
        ("conversation_id", "conversation"),
        ("histroy", "history"),
        ("cache_slat", "cache_salt"),
        ("return_source", "return_sources"),
        ("expect_next", "expect_next_s"),
        ("priorty", "priority"),
        ("sesion_id", "session_id"),
    ],
)
def test_a_misspelling_of_a_field_of_our_own_is_refused(
    ask: Callable[..., Any], name: str, meant: str
) -> None:
    for path, body in (
        (COMPLETION, {"prompt": "x"}),
        (CHAT, {"messages": HI}),
        ("/v1/responses", {"input": "x"}),
    ):
        error = ask(post(path, **body, **{name: "c"})).json()["error"]
        assert error["param"] == name and f"did you mean {meant}?" in error["message"]


@pytest.mark.parametrize(
    "own", [{"conversation": "c"}, {"history": "server", "conversation": "c", "top_k": 3}]
)
def test_a_field_of_our_own_inside_extra_body_is_refused(
    ask: Callable[..., Any], own: dict[str, Any]
) -> None:
    """Only OpenAI's Python client unpacks `extra_body`. Its client for JavaScript sends it as it
    is, as curl does."""
    error = ask(post(CHAT, messages=HI, extra_body=own)).json()["error"]
    assert error["param"] == "extra_body" and "put conversation" in error["message"]
    assert ask(post(CHAT, messages=HI, extra_body={"top_k": 3})).headers[IGNORED] == "extra_body"


def test_fields_of_conversations_are_all_our_own(ask: Callable[..., Any]) -> None:
    assert ask(post("/v1/conversations", id="a", ttl=5)).json()["error"]["param"] == "ttl"


@pytest.mark.parametrize(
    ("method", "path"), [("PATCH", "/v1/conversations/a"), ("POST", "/v1/conversations/a/pin")]
)
def test_a_time_without_its_unit_is_refused_with_its_name(
    ask: Callable[..., Any], method: str, path: str
) -> None:
    error = ask(lambda http: http.request(method, path, json={"ttl": 3600})).json()["error"]
    assert error["param"] == "ttl" and "did you mean ttl_s?" in error["message"]


def test_strict_fields_refuses_unknown_ones(ask: Callable[..., Any]) -> None:
    strict = HTTPSettings(strict_fields=True)
    for path, body in (
        (COMPLETION, {"prompt": "x"}),
        (CHAT, {"messages": HI}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = ask(post(path, **body, temprature=1), settings=strict)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temprature")
    assert ask(post(COMPLETION, prompt="x", user="me"), settings=strict).is_success


# -- fields without effect

WITHOUT_EFFECT: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "safety_identifier": "s",
    "request_id": "r",
    "include_reasoning": False,
    "mm_processor_kwargs": {"a": 1},
    "stream_interval": 5,
    "skip_special_tokens": True,
    "bad_words": [],
    "kv_transfer_params": {},
    "vllm_xargs": {},
}


def test_fields_that_have_no_effect_here_are_accepted(ask: Callable[..., Any]) -> None:
    async def everywhere(http: httpx.AsyncClient) -> list[httpx.Response]:
        bodies: list[tuple[str, dict[str, Any]]] = [
            (COMPLETION, {"prompt": "x"}),
            (CHAT, {"messages": HI, "modalities": ["text"], "documents": []}),
            ("/v1/responses", {"input": "x", "parallel_tool_calls": False, "max_tool_calls": 3}),
            (
                "/v1/responses",
                {"input": "x", "text": {"format": {"type": "text"}, "verbosity": "low"}},
            ),
            (
                "/v1/responses",
                {"input": "x", "include": ["reasoning.encrypted_content"], "reasoning": {}},
            ),
        ]
        return await asyncio.gather(
            *(http.post(path, json={**WITHOUT_EFFECT, **body}) for path, body in bodies)
        )

    for answer in ask(everywhere):
        assert answer.is_success and IGNORED not in answer.headers, answer.text
    assert ask(post("/v1/responses", input="x", metadata={"a": "b"}, store=False)).json()[
        "metadata"
    ] == {"a": "b"}


# -- templates and grammars

TEMPLATE = """{% if enable_thinking is false %}quick {% endif %}
{{- reasoning_effort or "" }}{{ bos_token }}
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{{- messages[0].content }}{{ documents or "" }}"""
VARIABLES = {
    "enable_thinking": False,
    "bos_token": "<b>",
    "documents": ["d"],
    "self": 1,
    "not a name": 2,
}


def test_template_variables_reach_the_template(ask: Callable[..., Any]) -> None:
    async def prompts(http: httpx.AsyncClient) -> list[str]:
        tools = [{"type": "function", "function": {"name": "f"}}]
        effort = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
        bodies: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": HI, "chat_template_kwargs": VARIABLES, "tools": tools}),
            (CHAT, {"messages": HI, **effort}),
            (CHAT, {"messages": HI}),
            ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high", "summary": "auto"}}),
            ("/v1/responses", {"input": "hi", "chat_template_kwargs": {"enable_thinking": False}}),
        ]
        for path, body in bodies:
            assert (await http.post(path, json=body)).is_success
        seen = {"messages": HI, "chat_template_kwargs": VARIABLES, "tools": tools}
        counted = (await http.post("/tokenize", json=seen)).json()["tokens"]
        prompts_sent = [message.request.prompt.tolist() for message in loop.messages(Submit)]
        assert prompts_sent[0] == counted
        return [
            "".join(chr(token - FIRST_BYTE) for token in prompt if token >= FIRST_BYTE)
            for prompt in prompts_sent
        ]

    loop = FakeLoop()
    told = ask(prompts, loop, settings=HTTPSettings(chat_template=TEMPLATE))
    assert told == ["quick <b>[f]hi['d']", "quick lowhi", "hi", "highhi", "quick hi"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_of_the_server_cannot_be_set(ask: Callable[..., Any], name: str) -> None:
    error = ask(post(CHAT, messages=HI, chat_template_kwargs={name: []})).json()["error"]
    assert error["param"] == "chat_template_kwargs" and name in error["message"]


def test_guided_fields_are_structured_outputs(ask: Callable[..., Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    same: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"guided_json": schema}, {"json": schema}),
        ({"guided_json": json.dumps(schema)}, {"json": json.dumps(schema)}),
        ({"guided_json": {}}, {"json": {}}),
    ]

    async def both(http: httpx.AsyncClient) -> None:
        for guided, structured in same:
            for fields in (guided, {"structured_outputs": structured}):
                answer = await http.post(CHAT, json={"messages": HI, **fields})
                assert answer.is_success, answer.text

    loop = FakeLoop()
    ask(both, loop)
    grammars = [message.request.sampling.grammar for message in loop.messages(Submit)]
    assert len(grammars) == 12 and None not in grammars and grammars[::2] == grammars[1::2]


# -- sessions


def test_a_session_marks_kv_and_stores_nothing(serve: Any) -> None:
    """Three ways to name it; `conversation` is another thing."""

    async def work() -> None:
        async with serve() as server:
            in_body: list[dict[str, Any]] = [
                {"session_id": "s"},
                {"conversation_params": {"conversation_id": "s"}},
            ]
            for body in in_body:
                await server.chat("hello", **body)
            headers = {"x-session-id": "s"}
            sent = {"prompt": "x"}
            assert (await server.http.post(COMPLETION, json=sent, headers=headers)).is_success
            await server.post("/v1/responses", input="x", store=False, session_id="s")
            assert {request.conversation for request in server.requests} == {"session::s"}
            assert not any(request.truncate for request in server.requests)
            await server.chat("hello", session_id="s", conversation="c")
            assert server.requests[-1].conversation == "c"
            listed = await server.ask("GET", "/v1/conversations")
            assert [conversation["id"] for conversation in listed["data"]] == ["c"]

    asyncio.run(work())


def test_one_request_of_several_carries_the_mark(ask: Callable[..., Any]) -> None:
    """A session's name is for one context: of n replies the first has it, of several prompts
    none."""

    async def ask_both(http: httpx.AsyncClient) -> None:
        await http.post(COMPLETION, json={"prompt": "x", "n": 2, "session_id": "s"})
        await http.post(COMPLETION, json={"prompt": ["x", "y"], "session_id": "s"})

    loop = FakeLoop()
    ask(ask_both, loop)
    assert [message.request.conversation for message in loop.messages(Submit)] == [
        "session::s",
        None,
        None,
        None,
    ]


def test_sessions_of_two_owners_never_meet(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            for key in ("one", "two"):
                await server.chat("hello", session_id="s", key=key)
            one, two = server.requests
            assert one.conversation != two.conversation and one.salt != two.salt

    asyncio.run(work())


def test_the_name_of_a_session_is_short(ask: Callable[..., Any]) -> None:
    answer = ask(
        lambda http: http.post(CHAT, json={"messages": HI}, headers={"x-session-id": "s" * 1001})
    )
    assert answer.status_code == 400 and "x-session-id" in answer.json()["error"]["message"]


def test_a_name_without_letters_can_stand_in_a_header() -> None:
    ignored: list[str] = []
    parse(
        CompletionBody,
        json.dumps({"prompt": "x", "": 1, "\x8fa\x89": 2, "two words": 3}).encode(),
        ignored,
    )
    assert ignored == ["_", "_a_", "two_words"]
