"""The operators' view of the HTTP process: limits, readiness, one log line for each request,
sources, model names."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend import grammar_check
from pensieve.runtime.frontend.bodies import ChatBody, parse
from pensieve.runtime.frontend.chat_messages import MOST_MESSAGES
from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.http.app import create_app
from pensieve.runtime.http.auth import OWNER
from pensieve.runtime.http.limits import ClientLimit, OpenSequences
from pensieve.runtime.http.messages import PromptBody
from pensieve.runtime.http.process import FrontDoor
from pensieve.runtime.http.settings import DEFAULTS, HTTPSettings, key_digest
from pensieve.runtime.http.tokenize import TokenizeBody
from pensieve.runtime.messages import Draining, Fatal, Submit
from pensieve.runtime.system import children
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import RequestError

from .fake_loop import FakeLoop, eventually, ready, say

PROMPT = [70, 71, 72]  # the FakeLoop echoes it and ends
SOURCES = {"gpu": 2, "host": 0, "disk": 0, "shared": 0, "recomputed": 0, "new": 1}  # of its tokens


@contextlib.asynccontextmanager
async def served(
    loop: FakeLoop, settings: HTTPSettings = DEFAULTS, **words: Any
) -> AsyncIterator[httpx.AsyncClient]:
    client = EngineClient(loop.client_end)
    about = replace(ready(), **words)
    app = create_app(
        client, about, Tokenizer.load(about.tokenizer) if about.tokenizer else None, settings
    )
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as http:
            yield http
    finally:
        await asyncio.to_thread(loop.close)
        await client.closed.wait()


def serve(
    loop: FakeLoop,
    work: Callable[[httpx.AsyncClient], Awaitable[Any]],
    *settings: HTTPSettings,
    **words: Any,
):
    async def main() -> Any:
        async with served(loop, *settings, **words) as http:
            return await asyncio.wait_for(work(http), 60)

    return asyncio.run(main())


def complete(http: httpx.AsyncClient, **body: Any) -> Awaitable[httpx.Response]:
    return http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **body})


# -- limits


def test_a_client_has_so_many_open_requests_and_no_more() -> None:
    loop = FakeLoop(say("y" * 100))
    loop.pause()

    async def three(http: httpx.AsyncClient) -> list[httpx.Response]:
        both = [asyncio.create_task(complete(http, max_tokens=30)) for _ in range(2)]
        await asyncio.to_thread(eventually, lambda: len(loop.messages(Submit)) == 2)
        third = await complete(http)
        assert (await http.get("/v1/models")).is_success, "only what makes the engine work counts"
        loop.go_on()
        return [third, *await asyncio.gather(*both), await complete(http)]

    refused, *served = serve(loop, three, HTTPSettings(max_requests_per_client=2))
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert (
        refused.json()["error"]["type"] == "rate_limit_error"
        and "has 2 of 2 sequences open" in refused.text
    )
    assert all(response.is_success for response in served)


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "sequences", "param"),
    [
        ("/v1/completions", {"prompt": [PROMPT] * 3}, 3, "prompt"),
        ("/v1/completions", {"prompt": PROMPT, "n": 3, "best_of": 3}, 3, "n"),
        ("/v1/completions", {"prompt": [PROMPT] * 2, "n": 2, "stream": True}, 4, "prompt"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, 3, "n"),
        ("/v1/responses", {"input": "x"}, 1, None),
    ],
)
def test_a_call_counts_as_the_sequences_that_it_asks_for(
    tokenizer_directory: Path, path: str, body: dict[str, Any], sequences: int, param: str | None
) -> None:
    loop = FakeLoop()
    words = {"tokenizer": str(tokenizer_directory)}
    loop.pause()

    async def fill(http: httpx.AsyncClient) -> list[httpx.Response]:
        call = asyncio.create_task(http.post(path, json=body))
        await asyncio.to_thread(loop.messages, Submit, sequences)
        refused = await complete(http)
        loop.go_on()
        return [refused, await call, await http.post(path, json=body)]

    refused, *served = serve(loop, fill, HTTPSettings(max_requests_per_client=sequences), **words)
    assert (
        refused.status_code == 429
        and f"has {sequences} of {sequences} sequences open" in refused.text
    )
    assert all(response.is_success for response in served)
    if param is None:
        return
    loop = FakeLoop()
    settings = HTTPSettings(max_requests_per_client=sequences - 1)
    refused = serve(loop, lambda http: http.post(path, json=body), settings, **words)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert f"{sequences} sequences" in refused.text and not loop.messages(Submit)


def test_a_call_beyond_what_is_left_is_refused_and_leaves_nothing_counted() -> None:
    loop = FakeLoop()
    loop.pause()

    async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
        three = asyncio.create_task(complete(http, prompt=[PROMPT] * 3))
        await asyncio.to_thread(loop.messages, Submit, 3)
        refused = [await complete(http, n=2) for _ in range(3)]
        one = asyncio.create_task(complete(http))
        await asyncio.to_thread(loop.messages, Submit, 4)
        refused.append(await complete(http))
        loop.go_on()
        return [*refused, await three, await one, await complete(http, n=4)]

    statuses = [
        response.status_code
        for response in serve(loop, work, HTTPSettings(max_requests_per_client=4))
    ]
    assert statuses == [429] * 4 + [200] * 3


def test_a_call_counts_while_its_body_arrives() -> None:
    async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
        begun, whole = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"prompt": [70],'
            begun.set()
            await whole.wait()
            yield b'"max_tokens": 1}'

        slow = asyncio.create_task(http.post("/v1/completions", content=slowly()))
        await begun.wait()
        refused = await complete(http)
        whole.set()
        return [refused, await slow, await complete(http)]

    answers = serve(FakeLoop(), work, HTTPSettings(max_requests_per_client=1))
    assert [answer.status_code for answer in answers] == [429, 200, 200]


@pytest.mark.parametrize(("keys", "refused"), [(False, ["a1", "a2", "c1"]), (True, ["a2", "b1"])])
def test_a_client_is_a_keys_owner_or_an_address(keys: bool, refused: list[str]) -> None:
    """Everybody comes while the first request, of owner a at address 1, is open."""

    async def main() -> list[str]:
        leave = asyncio.Event()
        came = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            came.append(scope["path"])
            await leave.wait()

        sequences = OpenSequences(1)
        limit = ClientLimit(app, sequences)
        told: list[str] = []

        def call(name: str, owner: str, address: str) -> Awaitable[None]:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    assert message["status"] == 429
                    told.append(name)

            scope = dict(type="http", method="POST", path=name, client=(address, 1))
            if keys:
                scope[OWNER] = owner
            return limit(scope, None, send)

        names = [
            ("first", "a", "1"),
            ("a1", "b", "1"),
            ("a2", "a", "1"),
            ("b1", "b", "2"),
            ("c1", "c", "1"),
        ]
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(call(*name)))
            await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(*tasks)
        assert not sequences._open
        assert len(came) + len(told) == len(names)
        return told

    assert asyncio.run(main()) == refused


@pytest.mark.parametrize("keys", [False, True])
def test_requests_name_the_owner_of_the_key_or_an_address(
    tokenizer_directory: Path, keys: bool
) -> None:
    """Without keys conversations belong to everybody, from any address."""
    loop = FakeLoop()

    async def work(http: httpx.AsyncClient) -> list[str]:
        if keys:
            http.headers["authorization"] = "Bearer secret"
        for path, body in (
            ("/v1/completions", {"prompt": [PROMPT] * 2, "n": 2}),
            ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "conversation": "tea"}),
            ("/v1/responses", {"input": "x", "store": False}),
            ("/v1/conversations/tea/fork", {"id": "copy"}),
        ):
            assert (await http.post(path, json=body)).is_success
        app = http._transport.app  # type: ignore[attr-defined]
        transport = httpx.ASGITransport(app, client=("10.0.0.7", 70))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=http.headers
        ) as elsewhere:
            body = {"messages": MESSAGES, "conversation": "copy", "history": "server"}
            assert (await elsewhere.post("/v1/chat/completions", json=body)).is_success
            listed = (await elsewhere.get("/v1/conversations")).json()["data"]
        return [entry["id"] for entry in listed]

    settings = HTTPSettings(api_keys=(key_digest("secret"),) if keys else ())
    listed = serve(loop, work, settings, tokenizer=str(tokenizer_directory))
    requests = [message.request for message in loop.messages(Submit)]
    expected = [key_digest("secret")] * 8 if keys else ["127.0.0.1"] * 7 + ["10.0.0.7"]
    assert [request.owner for request in requests] == expected
    assert len({request.salt for request in requests}) == 1 and sorted(listed) == ["copy", "tea"]
    assert len(requests[-1].prompt) > len(requests[4].prompt), "the turn before is part of it"


def test_grammars_of_one_key_do_not_delay_another_key(
    tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of twelve grammars is compiled for up to 600 s of a processor."""
    monkeypatch.setattr(grammar_check, "MOST_SECONDS", 600.0)

    def checked() -> list[int]:
        return [child for process in children(os.getpid()) for child in children(process)]

    def ask(
        http: httpx.AsyncClient, key: str, name: str, pattern: str
    ) -> asyncio.Task[httpx.Response]:
        grammar = {"grammar": f"start: {name}\n{name}: {pattern}"}
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": grammar}
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))

    async def work(http: httpx.AsyncClient) -> None:
        bad = [
            ask(http, "one", f"BAD{at}", "/.*a.{30}/ & /.*b.{29}/ & ~/.*c.{28}.*/")
            for at in range(12)
        ]
        await asyncio.to_thread(eventually, checked)
        for name in ("GOOD", "BETTER"):
            assert (await ask(http, "two", name, "/a+/")).is_success
        assert not any(call.done() for call in bad) and len(checked()) == 1
        for call in bad[1:]:
            call.cancel()
        while not bad[0].done():  # another one may be checked before it
            for child in checked():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            await asyncio.sleep(0.001)
        assert (await bad[0]).status_code == 503

    settings = HTTPSettings(api_keys=(key_digest("one"), key_digest("two")))
    serve(FakeLoop(), work, settings, tokenizer=str(tokenizer_directory))


def test_pages_of_other_origins_may_use_the_api_if_they_are_named() -> None:
    """A browser asks first, without a key."""
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def work(http: httpx.AsyncClient) -> list[tuple[int, str | None]]:
        answers = []
        for origin in ("https://one.example", "https://other.example"):
            headers = {"origin": origin}
            answers.append(await http.options("/v1/completions", headers=headers | asks))
            answers.append(
                await http.get("/v1/models", headers=headers | {"authorization": "Bearer secret"})
            )
        return [
            (answer.status_code, answer.headers.get("access-control-allow-origin"))
            for answer in answers
        ]

    keys = (key_digest("secret"),)
    named = serve(
        FakeLoop(), work, HTTPSettings(api_keys=keys, cors_origins=("https://one.example",))
    )
    assert named == [
        (200, "https://one.example"),
        (200, "https://one.example"),
        (400, None),
        (200, None),
    ]
    everyone = serve(FakeLoop(), work, HTTPSettings(api_keys=keys, cors_origins=("*",)))
    assert everyone == [(200, "*")] * 4
    assert serve(FakeLoop(), work, HTTPSettings(api_keys=keys)) == [(401, None), (200, None)] * 2


@pytest.mark.parametrize("announced", [True, False])
def test_a_long_body_is_refused(announced: bool) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 100

    async def both(http: httpx.AsyncClient) -> list[httpx.Response]:
        long = b" " * 900 if announced else stream()
        return [await http.post("/v1/completions", content=long), await complete(http)]

    refused, served = serve(FakeLoop(), both, HTTPSettings(max_body_bytes=800))
    assert refused.status_code == 413 and "800 bytes" in refused.json()["error"]["message"]
    assert served.is_success


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "zstd", "identity, BR", "identity", "utf-8", ""])
def test_a_compressed_body_is_refused_as_such(encoding: str) -> None:
    """Some clients write the character set into this header."""
    is_plain = encoding in ("identity", "utf-8", "")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 4}).encode()
    sent = body if is_plain else gzip.compress(body)

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        headers = {"content-encoding": encoding}
        assert (await http.get("/v1/models", headers=headers)).is_success
        return await http.post("/v1/completions", content=sent, headers=headers)

    answer = serve(FakeLoop(), work)
    if is_plain:
        assert answer.is_success
        return
    message = answer.json()["error"]["message"]
    assert answer.status_code == 415 and f"compressed ({encoding})" in message


def test_others_are_served_while_a_body_of_many_parts_is_read() -> None:
    parts = b",".join([b'{"type": "text", "text": ""}'] * 200_000)
    body = b'{"model": "other", "messages": [{"role": "user", "content": [' + parts + b"]}]}"

    async def both(http: httpx.AsyncClient) -> tuple[httpx.Response, int]:
        looks = 0
        long = asyncio.create_task(http.post("/v1/chat/completions", content=body))
        while not long.done():
            await asyncio.sleep(0.001)
            looks += 1
        return await long, looks

    refused, looks = serve(FakeLoop(), both)
    assert refused.status_code == 404 and "'other'" in refused.json()["error"]["message"]
    assert looks > 20, "hundreds; one if no other request is served meanwhile"


def test_messages_in_one_body_are_limited() -> None:
    async def all_three(http: httpx.AsyncClient) -> list[httpx.Response]:
        many = [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)
        bodies = (
            ("/v1/chat/completions", "messages"),
            ("/v1/responses", "input"),
            ("/tokenize", "messages"),
        )
        return [await http.post(path, json={name: many}) for path, name in bodies]

    for refused in serve(FakeLoop(), all_three):
        assert (
            refused.status_code == 400 and str(MOST_MESSAGES) in refused.json()["error"]["message"]
        )


def test_calls_and_results_in_one_body_are_limited() -> None:
    """Each takes as long as a message, also if they are blocks of few messages."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
    half = MOST_MESSAGES // 2
    reply = {"role": "assistant", "content": ""}
    user = {"role": "user", "content": [{"type": "text", "text": "x"}] * (MOST_MESSAGES + 1)}

    def chat(calls: int) -> list[Any]:
        return [
            user,
            {**reply, "tool_calls": [call] * half},
            {**reply, "tool_calls": [call] * calls},
        ]

    def blocks(results: int) -> list[Any]:
        return [
            user,
            {"role": "assistant", "content": [use] * half},
            {"role": "user", "content": [result] * results},
        ]

    for kind, messages in ((ChatBody, chat), (TokenizeBody, chat), (PromptBody, blocks)):
        parse(kind, json.dumps({"model": "fake", "messages": messages(half)}).encode())
        with pytest.raises(RequestError, match=f"{MOST_MESSAGES} calls and results") as refused:
            parse(kind, json.dumps({"model": "fake", "messages": messages(half + 1)}).encode())
        assert refused.value.subject == "messages"


# -- readiness


PROBES = ("/health", "/ping", "/ready", "/live")


@pytest.mark.parametrize(
    ("message", "live"), [(Draining(), 200), (Fatal("the books disagree"), 503)]
)
def test_health_tells_whether_requests_are_served_and_live_whether_a_restart_helps(
    message: object, live: int
) -> None:
    loop = FakeLoop()

    async def probe(http: httpx.AsyncClient) -> list[int]:
        async def probes() -> list[int]:
            return [(await http.get(path)).status_code for path in PROBES]

        before = await probes()
        loop.say(message)
        async with asyncio.timeout(60):
            while (after := await probes()) == before:
                await asyncio.sleep(0.005)
        return [*before, *after]

    assert serve(loop, probe) == [200, 200, 200, 200, 503, 503, 503, live]


def test_health_and_the_page_say_which_replica_it_is_and_where_its_histories_are() -> None:
    async def ask(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        return [(await http.get(path)).json() for path in ("/health", "/ui/state")]

    health, state = serve(FakeLoop(), ask, HTTPSettings(server="one-1"))
    histories = {"store": "SQLite", "healthy": True}
    assert health == {
        "replica": "one-1",
        "histories": histories,
        "kv_disk_full": False,
        "tier_names": {"gpu": "device", "host": "host", "disk": "disk", "shared": "shared"},
    }
    assert state | health == state


def test_while_the_engine_starts_probes_are_answered_and_requests_wait() -> None:
    async def main() -> tuple[list[int], httpx.Response]:
        door = FrontDoor()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(door), base_url="http://test"
        ) as http:
            early = asyncio.create_task(complete(http))
            probes = [(await http.get(path)).status_code for path in PROBES]
            assert not early.done()
            loop = FakeLoop()
            client = EngineClient(loop.client_end)
            door.open(create_app(client, ready(), None))
            probes += [(await http.get(path)).status_code for path in PROBES]
            response = await early
            await asyncio.to_thread(loop.close)
            await client.closed.wait()
            return probes, response

    probes, response = asyncio.run(main())
    assert probes == [503, 503, 503, 200, 200, 200, 200, 200] and response.is_success


def test_requests_that_wait_for_a_failing_start_are_answered() -> None:
    async def main() -> httpx.Response:
        door = FrontDoor()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(door), base_url="http://test"
        ) as http:
            early = asyncio.create_task(complete(http))
            await asyncio.sleep(0)
            door.close()
            return await early

    response = asyncio.run(main())
    assert response.status_code == 503 and "did not start" in response.json()["error"]["message"]


# -- the log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    with caplog.at_level(logging.INFO, "pensieve.runtime.frontend.calls"):
        yield lambda: [record.fields for record in caplog.records if record.msg == "request"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_at_its_end(
    lines: Callable[[], list[dict[str, Any]]], stream: bool
) -> None:
    answer = serve(FakeLoop(), lambda http: complete(http, conversation="tea", stream=stream))
    (line,) = lines()
    told = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))
    assert line["id"] == told["id"] and line["conversation"] == "tea"
    counts = [
        line[name] for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "finish")
    ]
    assert counts == [3, 2, 4, "stop"]
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"] < 1_000_000


def test_only_a_session_with_a_name_is_told(
    lines: Callable[[], list[dict[str, Any]]], tokenizer_directory: Path
) -> None:
    """A cache hint alone makes a session without a name."""
    body = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]}
    body |= {"cache_control": {"type": "ephemeral"}}
    for headers in ({}, {"x-session-id": "agent-7"}):
        ask = partial(httpx.AsyncClient.post, url="/v1/messages", json=body, headers=headers)
        assert serve(FakeLoop(), ask, tokenizer=str(tokenizer_directory)).is_success
    assert [line["session"] for line in lines()] == [None, "agent-7"]


def test_refused_failed_and_abandoned_requests_have_their_line(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    serve(FakeLoop(queue=0), complete)
    serve(
        FakeLoop(say("y" * 100), dies_with=1),
        lambda http: complete(http, max_tokens=50, stream=True),
    )
    ends = [(line["finish"], line["status"], line["ttft_ms"] is None) for line in lines()]
    assert ends == [("refused", 429, True), ("error", None, False)]


def test_the_owner_is_known_by_a_part_of_the_keys_digest(
    lines: Callable[[], list[dict[str, Any]]],
) -> None:
    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        return await complete(http, conversation="tea")

    async def with_key(http: httpx.AsyncClient) -> None:
        http.headers["authorization"] = "Bearer secret"
        assert (await ask(http)).is_success

    serve(FakeLoop(), ask)
    serve(FakeLoop(), with_key, HTTPSettings(api_keys=(key_digest("secret"),)))
    told = [(line["owner"], line["conversation"]) for line in lines()]
    assert told == [(None, "tea"), (key_digest("secret")[:8], "tea")]


def test_several_prompts_are_one_line(lines: Callable[[], list[dict[str, Any]]]) -> None:
    serve(
        FakeLoop(say("yyyyyyyy")),
        lambda http: complete(http, prompt=[[5, 6], [5, 6, 7]], max_tokens=4),
    )
    (line,) = lines()
    assert (line["prompt_tokens"], line["generated_tokens"], line["finish"]) == (5, 8, "length")


# -- sources, priority, names


@pytest.mark.parametrize("return_sources", [False, True])
def test_usage_says_where_tokens_came_from_if_asked(return_sources: bool) -> None:
    answer = serve(FakeLoop(), lambda http: complete(http, return_sources=return_sources)).json()
    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 2,
        **(SOURCES if return_sources else {}),
    }


def test_streamed_usage_says_it_too() -> None:
    body = {"return_sources": True, "stream": True, "stream_options": {"include_usage": True}}
    answer = serve(FakeLoop(), lambda http: complete(http, **body))
    last = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ][-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2, **SOURCES}


def test_when_the_next_turn_is_expected_reaches_the_loop() -> None:
    loop = FakeLoop()

    async def work(http: httpx.AsyncClient) -> None:
        for body in ({}, {"expect_next_s": 20}, {"expect_next_s": 0.5}):
            assert (await complete(http, **body)).status_code == 200
        for wrong in (-1, "soon"):
            assert (await complete(http, expect_next_s=wrong)).status_code == 400

    serve(loop, work)
    assert [message.request.expect_next_s for message in loop.messages(Submit)] == [None, 20.0, 0.5]


def test_the_priority_reaches_the_loop() -> None:
    loop = FakeLoop()

    async def three(http: httpx.AsyncClient) -> None:
        for body in ({}, {"priority": -2}, {"priority": 5}):
            await complete(http, **body)
        assert (await complete(http, priority="high")).status_code == 400

    serve(loop, three)
    assert [message.request.priority for message in loop.messages(Submit)] == [0, -2, 5]


def test_a_model_has_several_names_and_the_first_is_told() -> None:
    async def ask(http: httpx.AsyncClient) -> list[Any]:
        names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        answers = [await complete(http, model=name) for name in ("fake", "short", "other")]
        return [names, [answer.status_code for answer in answers], answers[1].json()["model"]]

    assert serve(FakeLoop(), ask, aliases=("short",)) == [
        ["fake", "short"],
        [200, 200, 404],
        "fake",
    ]
