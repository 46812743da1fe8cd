"""The HTTP process with real sockets: the official client, hang-ups, start and end."""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pensieve.runtime.conversations import turns
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.server import KEEP_ALIVE_SECONDS, FrontDoor
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.messages import Abort, Fatal, Forget, Ready, Submit
from pensieve.scheduler.types import SettingError

from ..conftest import served
from ..conversations.test_store import transcript
from ..fake_loop import FakeLoop, echo, eventually, ready, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_reply_that_is_not_read_when_the_server_ends_is_no_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """uvicorn cancels it; an error would be logged with a traceback."""

    async def work() -> None:
        sending = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            sending.set()
            await asyncio.Event().wait()

        door = FrontDoor()
        door.open(app)
        call = asyncio.create_task(door({"path": "/v1/completions"}, None, None))  # type: ignore[arg-type]
        await sending.wait()
        call.cancel()
        await call

    asyncio.run(work())
    assert "has not read its reply" in caplog.text


def serve_and_expire_at_once(*args: Any) -> None:
    """In the HTTP process."""
    turns.EXPIRY_SECONDS = 0.01
    serve_http(*args)


class Server:
    """The HTTP process over a FakeLoop."""

    def __init__(
        self,
        loop: FakeLoop,
        directory: Path,
        *settings: HTTPSettings,
        serve: Any = serve_http,
        engine: Ready | None = None,
    ):
        self.loop = loop
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(loop.client_end, listener, *settings))
        self.process.start()
        listener.close()
        loop.client_end.close()
        loop.say(engine or ready(str(directory)))

    def close(self) -> None:
        self.loop.close()
        self.process.join(60)
        assert self.process.exitcode == 0


@pytest.fixture(scope="module")
def server(tokenizer_directory: Path) -> Iterator[Server]:
    """One process for all tests of this module that only read its answers."""
    server = Server(
        FakeLoop(lambda request: echo(request)[-40:], step_seconds=0.002), tokenizer_directory
    )
    yield server
    server.close()


def test_the_official_client_holds_a_streamed_conversation(server: Server) -> None:
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )
    assert [model.id for model in client.models.list()] == ["fake"]
    messages: list[Any] = []
    for turn in ("Hello!", "Wie geht's? 😀", "世界"):
        messages.append({"role": "user", "content": turn})
        with client.chat.completions.create(
            model="fake",
            messages=messages,
            stream=True,
            max_completion_tokens=60,
            stream_options={"include_usage": True},
            extra_body={"conversation": "talk"},
        ) as stream:
            *chunks, last = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        reply = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        prompt = (
            "".join(f"{message['role']}: {message['content']}\n" for message in messages)
            + "assistant: "
        )
        assert reply == prompt.encode()[-39:].decode(errors="replace")
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert last.usage is not None and last.usage.prompt_tokens == 1 + len(prompt.encode())
        assert last.usage.prompt_tokens_details.cached_tokens == len(prompt.encode())
        messages.append({"role": "assistant", "content": reply})
    assert all(message.request.conversation == "talk" for message in server.loop.messages(Submit))
    whole = client.chat.completions.create(model="fake", messages=messages, temperature=0)
    assert whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=messages)


def test_a_stream_is_the_same_in_both_versions_of_http(server: Server) -> None:
    """HTTP/1.0 has no chunks. With HTTP/1.1 the connection serves another request after it."""
    body = json.dumps({"prompt": "read me aloud", "max_tokens": 250, "stream": True})
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    texts = []
    for _ in range(2):
        client.request("POST", "/v1/completions", body)
        texts.append(streamed_text(client.getresponse().read()))
    client.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as old:
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        old.sendall((head + body).encode())
        answer = b"".join(iter(lambda: old.recv(1 << 16), b""))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    texts.append(streamed_text(events))
    assert texts == 3 * ["read me aloud"]


def streamed_text(events: bytes) -> str:
    """Of a completion's stream, which must be whole."""
    *pieces, done, nothing = events.decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_its_request(
    server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.loop, "_step_seconds", 0.2)  # nearly a minute for the whole reply
    submitted, aborted = len(server.loop.messages(Submit)), len(server.loop.messages(Abort))
    body = json.dumps({"prompt": [9] * 4, "max_tokens": 250, "ignore_eos": True, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall((head + body).encode())
        eventually(lambda: len(server.loop.messages(Submit)) > submitted)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200")
    eventually(lambda: len(server.loop.messages(Abort)) > aborted)
    assert server.loop.messages(Abort)[-1].request == server.loop.messages(Submit)[-1].request.id


def test_the_process_ends_with_the_pipe_and_signals_are_the_parents(
    tokenizer_directory: Path,
) -> None:
    server = Server(FakeLoop(), tokenizer_directory)
    url = f"http://127.0.0.1:{server.port}"
    eventually(lambda: httpx.get(f"{url}/health", timeout=60).is_success)
    server.process.terminate()
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "still here"}, timeout=60).is_success
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_process_ends_if_the_start_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    for last_words in (Fatal("no such engine"), None):
        here, there = multiprocessing.Pipe()
        with listen("127.0.0.1", 0) as listener:
            if last_words is not None:
                here.send(last_words)
            here.close()
            serve_http(there, listener)


@pytest.mark.slow
def test_a_connection_may_be_idle_for_longer_than_balancers_keep_it(server: Server) -> None:
    """Closed by the server it would lose the request that comes at that moment."""
    assert KEEP_ALIVE_SECONDS > 60
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for pause in (6.0, 0.0):
        client.request("GET", "/health")
        first = client.sock
        assert b"histories" in client.getresponse().read() and client.sock is first
        time.sleep(pause)
    client.close()


def test_the_process_does_without_torch() -> None:
    """It starts at once and stays small compared with the engine's process."""
    look = "import sys, pensieve.runtime.http.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


def test_a_token_does_not_wait_for_the_acknowledgement_of_the_one_before() -> None:
    """asyncio sees to that only on sockets that were made with TCP's number, and `create_server`
    makes none."""
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert client.getpeername() == accepted.getsockname()
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_named_at_once() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(SettingError, match="--port"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(SettingError, match="--host"):
        listen("not an address", 0)


def test_what_has_expired_is_forgotten_without_a_request(
    tokenizer_directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "history.sqlite"
    store = HistoryStore(path)
    store.commit(Name("", "old"), transcript("0", "1"), 1.0)
    store.commit(Name("", "new"), transcript("2", "3"), store.now())
    store.close()
    settings = HTTPSettings(histories=path, history_ttl=1000.0)
    server = Server(FakeLoop(echo), tokenizer_directory, settings, serve=serve_and_expire_at_once)
    eventually(lambda: len(server.loop.messages(Forget)) == 1)
    server.close()
    assert [message.conversation for message in server.loop.messages(Forget)] == ["old"]


def test_histories_in_memory_expire_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[turns.TurnManager] = []
    monkeypatch.setattr(
        turns.TurnManager, "expire_in_background", lambda manager: begun.append(manager)
    )

    async def work() -> None:
        async with served(FakeLoop(echo), None):
            assert len(begun) == 1

    asyncio.run(work())
