"""Clients that are slow, deaf, many or malicious, against the HTTP process with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from pensieve.runtime.http.connection_limits import WRITE, PatientProtocol
from pensieve.runtime.http.event_sender import EventSender
from pensieve.runtime.http.listener import listen
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.settings import HTTPSettings
from pensieve.runtime.messages import Abort, Submit

from ..fake_loop import FakeLoop, echo, eventually, ready, save_tokenizer, say

PATIENCE_S = 0.5
MOST = 12


@contextlib.contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """The stderr of processes that are started meanwhile goes to the file."""
    ours = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


class Server:
    """The HTTP process over a FakeLoop."""

    def __init__(self, loop: FakeLoop, directory: Path, settings: HTTPSettings):
        self.loop = loop
        self._log = directory / "log"
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve_http, args=(loop.client_end, listener, settings)
        )
        with stderr_in(self._log):
            self.process.start()
        listener.close()
        loop.client_end.close()
        loop.say(ready(str(directory), max_model_len=10_000))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=60).is_success
        return False

    def check(self) -> None:
        """The server answers, and has logged no error of its own."""
        eventually(self.answers)
        assert "Traceback" not in self._log.read_text()

    def close(self) -> None:
        self.loop.close()
        self.process.join(60)
        assert self.process.exitcode == 0


def serve(tmp: Path, settings: HTTPSettings, loop: FakeLoop) -> Iterator[Server]:
    server = Server(loop, save_tokenizer(tmp), settings)
    try:
        server.check()
        yield server
        server.check()
    finally:
        server.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = HTTPSettings(max_connections=MOST, client_timeout=PATIENCE_S)
    yield from serve(
        tmp_path_factory.mktemp("tokenizer"), settings, FakeLoop(say("y" * 250), step_seconds=0.01)
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    loop = FakeLoop(lambda request: echo(request)[-40:])
    yield from serve(tmp_path_factory.mktemp("tokenizer"), HTTPSettings(), loop)


def received(wire: socket.socket) -> bytes:
    """All until the end; a connection that is cut ends too."""
    whole = b""
    try:
        while data := wire.recv(1 << 16):
            whole += data
    except ConnectionResetError:
        pass
    return whole


def unless_stopped(client: Callable[[], None]) -> None:
    """Plays the client of an impatient server. A busy machine can stop it for longer than the
    server waits, which cuts it off then: a client that fails after so long a time plays again."""
    for _ in range(20):
        began = time.monotonic()
        try:
            return client()
        except (AssertionError, OSError, httpx.TransportError):
            if time.monotonic() - began < PATIENCE_S:
                raise
    return client()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{"]
)
def test_a_client_that_stops_sending_is_cut_off(impatient: Server, sent: bytes) -> None:
    began = time.monotonic()
    with impatient.connect() as wire:
        with contextlib.suppress(OSError):  # cut off before it was sent
            wire.sendall(sent)
        assert received(wire) == b""
    assert time.monotonic() - began > PATIENCE_S * 0.8


def test_a_request_behind_another_one_may_not_stop_either(impatient: Server) -> None:
    """All of it comes in one piece, so no further bytes arrive after the first answer."""

    def client() -> None:
        with impatient.connect() as wire:
            wire.sendall(
                b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"Content-Length: 50\r\n\r\n{"
            )
            assert received(wire).startswith(b"HTTP/1.1 200 ")

    unless_stopped(client)


def test_drop_by_drop_is_no_better(impatient: Server) -> None:
    """Every drop comes long before the time is up: a head has one time for all of it, a body must
    keep a pace."""
    body = HEAD + b"Content-Length: 5000\r\n\r\n"
    for start, drop in ((HEAD, b"X-A: b\r\n"), (body, b" ")):
        with impatient.connect() as wire, pytest.raises(OSError):
            wire.sendall(start)
            for _ in range(100):
                wire.sendall(drop)
                time.sleep(PATIENCE_S / 5)


def test_a_client_that_does_not_listen_is_cut_off_and_its_request_aborted(
    impatient: Server,
) -> None:
    """Small buffers, and long events that the client does not read."""
    body = {
        "prompt": [9] * 4,
        "max_tokens": 9000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
        "n": 40,
    }
    text = json.dumps(body).encode()
    aborted = len(impatient.loop.messages(Abort))

    def client() -> None:
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(impatient.address)
            wire.sendall(HEAD + f"Content-Length: {len(text)}\r\n\r\n".encode() + text)
            eventually(lambda: len(impatient.loop.messages(Abort)) > aborted)

    unless_stopped(client)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"50000")]}
    )
    await send({"type": "http.response.body", "body": bytes(50_000)})


Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(
    sent: bytes, application: Application, patience: float
) -> AsyncIterator[tuple[socket.socket, PatientProtocol]]:
    """A client in this process with a small buffer, that has sent so much."""
    config = uvicorn.Config(application, timeout_keep_alive=1)
    state = ServerState()
    config.load()
    client, ours = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with client:
        client.sendall(sent)
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: PatientProtocol(config, state, {}, most=9, patience=patience), sock=ours
        )
        yield client, protocol


@contextlib.asynccontextmanager
async def answered(
    sent: bytes, patience: float = PATIENCE_S
) -> AsyncIterator[tuple[socket.socket, PatientProtocol]]:
    """A client of `answer`, whose buffer holds less than that."""
    async with connected(sent, answer, patience) as (client, protocol):
        await until(lambda: protocol.server_state.total_requests)
        yield client, protocol


async def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.01)


def test_the_wait_for_the_end_of_a_last_answer_is_limited() -> None:
    """The application has sent it and it fits into the buffers, so nothing else waits."""

    async def work() -> None:
        async with answered(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (
            _,
            protocol,
        ):
            await until(lambda: not protocol.connections)

    asyncio.run(work())


def test_a_slow_reader_of_a_last_answer_has_time_for_its_end() -> None:
    """From the moment at which most of it is gone."""

    async def work() -> None:
        request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with answered(request, patience=600) as (_, protocol):
            assert protocol._taking is not None
            began = protocol._taking.when()
            time.sleep(0.01)
            protocol.resume_writing()
            assert protocol._taking.when() > began

    asyncio.run(work())


def test_a_connection_whose_late_body_has_come_is_closed_when_nothing_more_does() -> None:
    async def work() -> None:
        request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
        async with answered(request) as (client, protocol):
            assert len(client.recv(1 << 16)) > 1000
            client.sendall(b"hello")
            await until(lambda: not protocol.connections)

    asyncio.run(work())


def test_a_stream_over_a_full_socket_arrives_whole_and_in_order() -> None:
    """Events are written directly while the client reads, and kept while it does not."""
    put = [0]
    paused = [0]
    reads = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        sender = EventSender(send, [], scope[WRITE])  # type: ignore[literal-required]

        def put_next() -> None:
            sender.put(f"event {put[0]}\n")
            put[0] += 1

        for _ in range(3):
            await until(lambda: not sender.waits)
            reads.clear()
            while not sender.waits:  # until the socket's buffers are full
                put_next()
                await asyncio.sleep(0)
            paused[0] += 1
            for _ in range(100):
                put_next()
            reads.set()
        await sender.end()

    async def work() -> bytes:
        request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        async with connected(request, stream, patience=60) as (client, _):
            client.setblocking(False)
            data = b""
            while not data.endswith(b"\r\n0\r\n\r\n"):
                await reads.wait()
                data += await asyncio.get_running_loop().sock_recv(client, 1 << 12)
            return data

    stream_bytes = asyncio.run(work())
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.receive_data(stream_bytes)
    text = b""
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        text += event.data if isinstance(event, h11.Data) else b""
    assert paused == [3]
    assert text.decode().splitlines() == [f"event {number}" for number in range(put[0])]


def test_nothing_is_kept_of_a_connection_that_breaks() -> None:
    """It is closed with unread bytes, which its other end sees as an error."""

    async def work() -> None:
        async with answered(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD) as (client, protocol):
            client.close()
            await until(lambda: not protocol.connections)
            kept = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            assert not [
                timer for timer in kept if not timer.cancelled() and "Protocol" in repr(timer)
            ]

    asyncio.run(work())


def test_a_body_that_comes_behind_its_answer_leaves_no_limit(impatient: Server) -> None:
    """A connection that waits for its next request may do so as long as any other."""

    def is_served_later() -> bool:
        with impatient.connect() as wire:
            wire.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
            first = wire.recv(1 << 16)
            wire.sendall(b"hello")
            time.sleep(2 * PATIENCE_S)
            wire.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return first.startswith(b"HTTP/1.1 404 ") and b"HTTP/1.1 200 " in received(wire)

    def whatever_the_machine_does() -> bool:
        with contextlib.suppress(ConnectionError):
            return is_served_later()
        return False

    eventually(whatever_the_machine_does)


@pytest.mark.parametrize("header", [b"", b"Upgrade: h2c\r\n"])
def test_a_client_that_hangs_up_is_noticed_after_any_further_bytes(
    server: Server, header: bytes
) -> None:
    body = b'{"prompt": "x", "max_tokens": 50}'
    aborted, submitted = len(server.loop.messages(Abort)), len(server.loop.messages(Submit))
    with contextlib.ExitStack() as pause:
        server.loop.pause()
        pause.callback(server.loop.go_on)
        for number, behind in enumerate((b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3), 1):
            with server.connect() as wire:
                wire.sendall(HEAD + header + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                server.loop.messages(Submit, submitted + number)
                for _ in range(3):
                    wire.sendall(behind)
                    time.sleep(0.02)
            server.loop.messages(Abort, aborted + number)


def test_so_many_connections_and_no_more(impatient: Server) -> None:
    """They are cut off soon, on a busy machine before all have come: then once more."""

    def the_last_is_refused() -> bool:
        with contextlib.ExitStack() as wires:
            *_, late = [wires.enter_context(impatient.connect()) for _ in range(MOST + 1)]
            return received(late).startswith(b"HTTP/1.1 503 ")

    eventually(the_last_is_refused)
    eventually(impatient.answers)


def test_a_quick_client_notices_nothing(impatient: Server) -> None:
    """It lasts longer than all time limits, on one connection."""

    def quick_client() -> None:
        with httpx.Client(base_url=impatient.url, timeout=60) as http:
            for _ in range(2):
                body = {"prompt": "x", "max_tokens": 60}
                assert http.post("/v1/completions", json=body).is_success
                time.sleep(PATIENCE_S / 2)

    unless_stopped(quick_client)


def test_a_long_head_is_refused(server: Server) -> None:
    with server.connect() as wire:
        wire.sendall(HEAD + b"X: " + b"y" * 40_000)
        assert received(wire).startswith(b"HTTP/1.1 400 ")


def test_half_a_request_is_no_error_of_the_server(server: Server) -> None:
    with server.connect() as wire:
        wire.sendall(HEAD + b"Content-Length: 50\r\n\r\n{")
    with server.connect() as wire:  # other bytes after a request that is being answered
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n\x00\x00\r\n\r\n" * 3)
        received(wire)
    server.check()


def test_a_broken_body_of_a_head_request_gets_an_answer_without_text(server: Server) -> None:
    with server.connect() as wire:
        wire.sendall(
            b"HEAD /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"
        )
        assert received(wire).startswith(b"HTTP/1.1 400 ")
    server.check()


@pytest.mark.parametrize("path, status", [("/nothing", 404), ("/health", 405)])
def test_a_broken_body_after_the_answer_ends_the_connection_quietly(
    server: Server, path: str, status: int
) -> None:
    """The answer did not wait for the body; there is no second one to the same request."""
    with server.connect() as wire:
        wire.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
            "chunked\r\n\r\n5\r\nhello".encode()
        )
        head, _, body = wire.recv(1 << 16).partition(b"\r\n\r\n")
        wire.sendall(b"no length\r\n" * 3)
        body += received(wire)
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and json.loads(body)["error"]
    server.check()


@pytest.mark.parametrize(
    "behind", [b"\r\n", b"\x00\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_what_comes_behind_a_connections_last_request_costs_no_answer(
    impatient: Server, behind: bytes
) -> None:
    """Both for an answer that has begun and for one that has not; neither ends before all of the
    further bytes have come."""

    def client(stream: bool, end: bytes) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 20, "stream": stream}).encode()
        with impatient.connect() as wire, contextlib.ExitStack() as pause:
            pause.callback(impatient.loop.go_on)
            if stream:
                impatient.loop.pauses_behind = 5
            else:
                impatient.loop.pause()
            wire.sendall(
                HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            answer = wire.recv(1 << 16) if stream else b""
            for _ in range(3):
                time.sleep(0.03)
                wire.sendall(behind)
            pause.close()
            answer += received(wire)
        assert answer.startswith(b"HTTP/1.1 200 ") and end in answer

    unless_stopped(lambda: client(True, b"data: [DONE]"))
    unless_stopped(lambda: client(False, b'"total_tokens":'))


SCHEMATHESIS = """
[checks]
enabled = false
not_a_server_error.enabled = true
unsupported_method.enabled = true
use_after_free.enabled = true

[[operations]]  # an id may end in "/fork": PATCH of that path is one of such a conversation
include-path-regex = "/(fork|pin|unpin|items|items/[^/]+)$"
checks.unsupported_method.enabled = false
"""


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: Server, tmp_path: Path) -> None:
    """A short look at every operation with values good and bad. Longer: see
    docs/use/operations.md."""
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json"]
    # so many cases on any machine, which may be slow
    options = ["--seed", "1", "--max-examples", "20", "--suppress-health-check", "too_slow"]
    options += ["--max-response-time", "60", "--no-color"]
    ran: Any = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=1200, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
    assert "Tested: " in ran.stdout and server.loop.messages(Submit)
