"""The HTTP process with workers (`--api-server-count`): several processes answer as one."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.turns import Beginning
from pensieve.runtime.http.process import serve_http
from pensieve.runtime.http.settings import HTTPSettings, key_digest
from pensieve.runtime.http.workers import pool
from pensieve.runtime.http.workers.pool import RunningWorker, SharedServices, WorkerCalls
from pensieve.runtime.http.workers.worker import FIRST_ID_BITS
from pensieve.runtime.messages import Abort, Forget, Fork, Keep, Look, Submit
from pensieve.runtime.system import descendants, running
from pensieve.scheduler.types import ErrorKind, Request, RequestError

from ...pausing import pause
from ..fake_loop import FakeLoop, eventually
from ..odd_tokenizer import save_merging
from ..served import CHAT, odd_ready, spell
from .test_process import Server

COMPLETIONS = "/v1/completions"
MOST = 6  # sequences of a client
MOST_CONNECTIONS = 30
SLOW = 0.05  # seconds of a step: a long reply takes a minute
LONG: dict[str, Any] = {"prompt": [9], "max_tokens": 600, "ignore_eos": True, "stream": True}


class Workers(Server):
    """`count` processes that serve clients; 1: none besides the HTTP process."""

    def __init__(self, directory: Path, count: int, serve: Any = serve_http, **settings: Any):
        super().__init__(
            FakeLoop(spell, step_seconds=0.001),
            directory,
            HTTPSettings(api_server_count=count, **settings),
            serve=serve,
            engine=replace(odd_ready(), tokenizer=str(directory)),
        )
        self.url = f"http://127.0.0.1:{self.port}"
        eventually(lambda: self.get("/health").is_success)

    @property
    def workers(self) -> list[int]:
        """Their processes."""
        return self.processes(b"workers.worker")

    def processes(self, word: bytes) -> list[int]:
        """Those of the HTTP process and its workers with this word in their command."""
        assert self.process.pid is not None
        return [
            child
            for child in descendants(self.process.pid)
            if word in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    @property
    def requests(self) -> list[Request]:
        return [message.request for message in self.loop.messages(Submit)]

    @property
    def aborted(self) -> set[int]:
        return {message.request for message in self.loop.messages(Abort)}

    def metric(self, name: str) -> float:
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert match is not None
        return float(match[1])


def serve_with_short_beats(*args: Any) -> None:
    """In the HTTP process."""
    pool.BEAT_S = 0.3
    serve_http(*args)


def worker_of(request: Request) -> int:
    return request.id >> FIRST_ID_BITS


class Client:
    """A connection that stays open. `worker`: the number of the worker that has it."""

    def __init__(self, server: Workers, key: str = "", status: int = 200):
        """`status`: of its first request."""
        self._server = server
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self.post(COMPLETIONS, status, prompt=[9], max_tokens=1)
        self.worker = worker_of(server.requests[-1])

    def begin(self, method: str, path: str, **body: Any) -> http.client.HTTPResponse:
        self._connection.request(method, path, json.dumps(body) if body else None, self._headers)
        return self._connection.getresponse()

    def ask(self, method: str, path: str, status: int = 200, **body: Any) -> Any:
        response = self.begin(method, path, **body)
        text = response.read().decode()
        assert response.status == status, text
        return json.loads(text) if text.startswith("{") else text

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        return self.ask("POST", path, status, **body)

    def chat(self, *contents: str, **body: Any) -> str:
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": content}
            for at, content in enumerate(contents)
        ]
        answer = self.post(CHAT, messages=messages, **body)
        return str(answer["choices"][0]["message"]["content"])

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def clients_of(server: Workers, count: int, key: str = "") -> Iterator[list[Client]]:
    """Clients of so many workers, one of each. Other connections stay open meanwhile, because the
    next one goes to the worker that has the fewest."""
    with contextlib.ExitStack() as opened:
        clients: dict[int, Client] = {}

        def all_met() -> bool:
            client = Client(server, key)
            opened.callback(client.close)
            clients.setdefault(client.worker, client)
            return len(clients) == count

        eventually(all_met)  # a worker that has just been started takes none yet
        yield list(clients.values())


@contextlib.contextmanager
def slow_steps(server: Workers) -> Iterator[None]:
    before = server.loop._step_seconds
    server.loop._step_seconds = SLOW
    try:
        yield
    finally:
        server.loop._step_seconds = before


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_merging(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[Workers]:
    server = Workers(directory, 1)
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Workers]:
    server = Workers(directory, 3, max_requests_per_client=MOST, max_connections=MOST_CONNECTIONS)
    yield server
    server.close()


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", COMPLETIONS, {"prompt": "Hello", "echo": True, "n": 2, "seed": 3}),
    ("POST", COMPLETIONS, {"prompt": ["One", "Two"], "stop": "world", "stream": True}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 5, "logprobs": 2, "stream": True}),
    ("POST", COMPLETIONS, {"prompt": ""}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "n": MOST + 1, "max_tokens": 1, "unknown": 1}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "conversation": "same"}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    (
        "POST",
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {"type": "json_object"},
        },
    ),
    ("POST", "/v1/responses", {"input": "Hi", "stream": True}),
    ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30}),
    ("POST", "/tokenize", {"prompt": "Hello"}),
    ("POST", f"{CHAT}/render", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("GET", CHAT, {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/nothing", {}),
    ("GET", "/v1/conversations/same", {}),
    ("HEAD", "/ui", {}),
    ("DELETE", "/v1/conversations/same", {}),
]
OWN = re.compile(r'"[a-z_]*id": ?"[^"]*"|"[a-z_]+_at": ?\d+|"created": ?\d+|[a-z]+_[0-9a-f]{20,}')
"""Text that differs between two equal answers."""


def comparable(answer: str) -> object:
    """Of a stream its text, whichever events it came in."""
    if "data: " not in answer:
        return OWN.sub("", answer).replace(f"a client may have {MOST}", "")
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if "data: {" in line]
    texts: dict[str, str] = {}
    for event in map(json.loads, lines):
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            name = str(choice["index"])
            texts[name] = texts.get(name, "") + text + (choice["finish_reason"] or "")
        if event.get("type") == "response.completed":
            return OWN.sub("", json.dumps(event["response"]["output"]))
    return texts


def test_the_answers_are_those_of_one_process(server: Workers, alone: Workers) -> None:
    answers: list[list[tuple[int, object]]] = []
    for one in (alone, server):
        client = Client(one)
        responses = []
        for method, path, body in CALLS:
            response = client.begin(method, path, **body)
            responses.append((response.status, comparable(response.read().decode())))
        client.close()
        answers.append(responses)
    limited = 4  # the call with more sequences than a client may have
    assert answers[1].pop(limited)[0] == 400 and answers[0].pop(limited)[0] == 200
    assert answers[0] == answers[1]


def test_a_turn_goes_on_at_another_worker(server: Workers, alone: Workers) -> None:
    """The reply's own ids are its prompt, as after a turn at the same worker: its text would have
    others. Without a name, with one, and with the server's history."""

    def dialogues(first: Client, second: Client) -> None:
        unnamed = first.chat("Hello?")
        second.chat("Hello?", unnamed, "Go on!")
        named = first.chat("Hi!", conversation="two")
        second.chat("Hi!", named, "And?", conversation="two")
        first.chat("What else?", conversation="two", history="server")
        response = first.post("/v1/responses", input="One")
        second.post("/v1/responses", input="Two", previous_response_id=response["id"])

    prompts = []
    with clients_of(server, 2) as two, clients_of(alone, 1) as one:
        for at, clients in ((server, two), (alone, 2 * one)):
            before = len(at.requests)
            dialogues(*clients)
            prompts.append([request.prompt for request in at.requests[before:]])
        assert prompts[0] == prompts[1]
        first, second, *_ = prompts[0]
        assert list(second[: len(first)]) == list(first)
        workers = {worker_of(request) for request in server.requests[-7:]}
        assert workers == {client.worker for client in two}


def test_a_conversation_is_the_same_at_all_workers(server: Workers) -> None:
    """Delete, fork, pin and lifetimes; the loop is told as by one process."""
    with clients_of(server, 3) as (first, second, third):
        first.chat("Hello?", conversation="all")
        path = "/v1/conversations/all"
        before = len(server.loop.log)
        second.post(f"{path}/fork", id="other")
        third.post(f"{path}/pin", ttl_s=100)
        second.post(path, ttl_s=5)
        seen = third.ask("GET", path)
        assert seen["ttl_s"] == 5 and seen["pinned_until"]
        third.ask("DELETE", path)
        for client in (first, second, third):
            client.ask("GET", path, 404)
            client.post(
                CHAT,
                404,
                messages=[{"role": "user", "content": "?"}],
                conversation="all",
                history="server",
            )
            assert client.ask("GET", "/v1/conversations/other")["messages"]
        messages = [
            message for message in server.loop.log[before:] if not isinstance(message, Look)
        ]
        assert [type(message) for message in messages] == [Fork, Keep, Keep, Forget]


def test_one_limit_holds_over_all_workers(server: Workers) -> None:
    """A client that sends one request after the other is never refused, at whichever worker."""
    with clients_of(server, 3) as clients:
        for turn in range(3 * MOST):
            clients[turn % 3].post(COMPLETIONS, prompt="Hi", n=MOST, max_tokens=1)
        with slow_steps(server):
            before = len(server.requests)
            responses = [client.begin("POST", COMPLETIONS, **LONG, n=2) for client in clients]
            assert [response.status for response in responses] == 3 * [200]
            refused = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "Hi"}, timeout=60)
            assert refused.status_code == 429 and f"{MOST} of {MOST}" in refused.text
            clients[0].close()
            eventually(lambda: len(server.aborted & {r.id for r in server.requests[before:]}) == 2)
            clients.append(Client(server))


def test_the_limit_of_a_key_holds_over_all_workers(directory: Path) -> None:
    """Both keys come from one address, and each has its own."""
    keys = ("of one", "of another")
    server = Workers(directory, 2, max_requests_per_client=2, api_keys=tuple(map(key_digest, keys)))
    with (
        clients_of(server, 2, keys[0]) as ones,
        clients_of(server, 2, keys[1]) as others,
        slow_steps(server),
    ):
        for clients, key in zip((ones, others), keys, strict=True):
            for client in clients:
                assert client.begin("POST", COMPLETIONS, **LONG).status == 200
            Client(server, key, 429).close()
    server.close()


def test_hang_ups_leave_no_turn_and_no_sequence_open(server: Workers) -> None:
    """At once, and after the first event: calls between the processes are under way."""
    with slow_steps(server):
        for at in range(2 * MOST):
            message = {"role": "user", "content": "Hi"}
            body = {"messages": [message], "conversation": f"gone {at}", "ignore_eos": True}
            text = json.dumps(body | {"stream": True})
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall((head + text).encode())
                if at % 2:
                    assert client.recv(1 << 16)

    def all_free() -> bool:
        whole = {"prompt": "Hi", "n": MOST, "max_tokens": 1}
        return httpx.post(f"{server.url}{COMPLETIONS}", json=whole, timeout=60).is_success

    def all_ended() -> bool:
        answers = [server.get(f"/v1/conversations/gone {at}") for at in range(2 * MOST)]
        return all(one.status_code == 404 or not one.json()["in_flight"] for one in answers)

    eventually(all_free)
    eventually(all_ended)


def test_one_limit_of_connections_holds_over_all_workers(server: Workers) -> None:
    def busy() -> bool:
        return httpx.get(f"{server.url}/live", timeout=60).status_code == 503

    with contextlib.ExitStack() as opened:
        eventually(lambda: not busy())
        address = ("127.0.0.1", server.port)
        sockets = []

        def full() -> bool:
            sockets.append(opened.enter_context(socket.create_connection(address)))
            return len(sockets) >= MOST_CONNECTIONS and busy()

        eventually(full)  # one more for each that came before an earlier one's end was told
        sockets[0].close()
        eventually(lambda: not busy())


def test_a_request_for_all_is_answered_before_its_body(server: Workers) -> None:
    """As by one process, where nothing reads the body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")


def test_two_processes_check_the_grammars_of_all_workers(server: Workers) -> None:
    with clients_of(server, 3) as clients:
        for client in clients:
            client.post(COMPLETIONS, prompt="Hi", structured_outputs={"regex": "[a-z]+"})
            client.post(COMPLETIONS, 400, prompt="Hi", structured_outputs={"regex": "["})
        assert [request.sampling.grammar is not None for request in server.requests[-3:]] == 3 * [
            True
        ]
    assert len(server.processes(b"grammar_check")) == 2


def test_the_metrics_count_the_requests_of_all(server: Workers) -> None:
    names = (
        'pensieve:requests_total{finish="stop"}',
        "pensieve:generation_tokens_total",
        "pensieve:e2e_request_latency_seconds_count",
        'pensieve:client_errors_total{status="400"}',
        "pensieve:inter_token_latency_seconds_count",
    )

    def counts() -> list[float]:
        for client in clients:  # each worker has told its counts before it asks for this
            assert client.ask("GET", "/health")["histories"]["healthy"]
        return [server.metric(name) for name in names]

    with clients_of(server, 3) as clients:
        clients[0].post(COMPLETIONS, 400, prompt="")
        before = counts()
        for client in clients:
            client.post(COMPLETIONS, prompt="Hi")
            client.post(COMPLETIONS, 400, prompt="")
        tokens = sum(len(spell(request)) for request in server.requests[-3:])
        expected = [3, tokens, 3, 3, tokens - 3]
        assert counts() == [old + new for old, new in zip(before, expected, strict=True)]
        for client in clients:
            assert client.ask("GET", "/ui/state")["generated"] == server.metric(names[1])


def test_a_client_that_does_not_read_delays_no_other(server: Workers) -> None:
    """The reply's text is longer than all buffers between the two."""
    body = {"prompt": ["Hello"] * MOST, "max_tokens": 600, "ignore_eos": True, "stream": True}
    text = json.dumps(body | {"logprobs": 5})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    before = len(server.requests)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall((head + text).encode())
        eventually(lambda: len(server.requests) == before + MOST)
        for at in range(9):  # each worker gets some of them
            answer = httpx.post(
                f"{server.url}/tokenize", json={"prompt": f"Hello {at}"}, timeout=60
            )
            assert answer.status_code in (200, 429)
        eventually(lambda: not server.loop._running)  # the loop has not waited for it either
    eventually(lambda: httpx.post(f"{server.url}/tokenize", json={"prompt": ""}).is_success)


def test_a_worker_that_dies_is_replaced(directory: Path) -> None:
    """Its streams end and its requests are aborted; other workers' clients notice nothing. What it
    held of the limit and of conversations is released."""
    server = Workers(directory, 2, max_requests_per_client=4)
    with clients_of(server, 2) as (dying, other):
        by_number = dict(zip(sorted({dying.worker, other.worker}), server.workers, strict=True))
        dying.chat("Hello?", conversation="mine")
        with slow_steps(server):
            body = {"messages": [{"role": "user", "content": "More"}], "ignore_eos": True}
            cut = dying.begin(
                "POST", CHAT, **body, stream=True, conversation="mine", history="server"
            )
            kept = other.begin("POST", COMPLETIONS, **LONG)
            cut_request, kept_request = server.requests[-2:]
            assert worker_of(cut_request) == dying.worker
            os.kill(by_number[dying.worker], signal.SIGKILL)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                cut.read()
            eventually(lambda: cut_request.id in server.aborted)
            eventually(lambda: len(server.workers) == 2)
            assert by_number[dying.worker] not in server.workers
            assert server.get("/health").is_success
        text = kept.read().decode()
        assert text.endswith("data: [DONE]\n\n") and kept_request.id not in server.aborted
        # the limit allows four
        other.post(COMPLETIONS, prompt="Hi", n=4, max_tokens=1)
        other.chat("Again", conversation="mine", history="server")
    with clients_of(server, 2) as clients:
        numbers = {client.worker for client in clients}
        assert numbers == {other.worker, 3}
    workers = server.workers
    server.close()
    assert not any(map(running, workers))


def test_a_worker_that_hangs_is_replaced(directory: Path) -> None:
    server = Workers(directory, 2, serve_with_short_beats)
    with clients_of(server, 2) as (hanging, other):
        by_number = dict(zip(sorted({hanging.worker, other.worker}), server.workers, strict=True))
        pause(by_number[hanging.worker])
        with pytest.raises(ConnectionError):
            hanging.post(COMPLETIONS, prompt="Hi")
        other.post(COMPLETIONS, prompt="Hi")
        eventually(lambda: len(server.workers) == 2)
        assert by_number[hanging.worker] not in server.workers
    with clients_of(server, 2) as clients:
        assert {client.worker for client in clients} == {other.worker, 3}
    server.close()


def test_a_worker_that_is_late_gets_connections_last() -> None:
    given = []

    class Stub(RunningWorker):
        def __init__(self, name: str, connections: int):
            self._name = name
            self.connections = connections
            self.silent = 0
            self.up = True
            self.channel = Mock()

        def give(self, connection: socket.socket, mark: bytes) -> bool:
            given.append(self._name)
            return True

    async def give_both() -> None:
        with socket.socket() as listener:
            workers = pool.Workers(listener, HTTPSettings(api_server_count=2))
            hanging, busy = Stub("hanging", 0), Stub("busy", 9)
            workers._running = {1: hanging, 2: busy}
            for _ in range(2):
                for worker in (hanging, busy):
                    worker.beat()
                busy.answer_beat()
            workers._give(listener)
            hanging.answer_beat()
            workers._give(listener)

    asyncio.run(give_both())
    assert given == ["busy", "hanging"]


def test_refusals_at_the_same_time_ask_the_workers_once() -> None:
    questions = []

    async def refuse(count: int) -> None:
        with socket.socket() as listener:
            workers = pool.Workers(listener, HTTPSettings(api_server_count=2))
            answers: list[asyncio.Future[None]] = []

            async def ask(method: Any) -> None:
                questions.append(method)
                answers.append(asyncio.get_running_loop().create_future())
                await answers[-1]

            workers._running = {1: Mock(channel=Mock(ask=ask))}
            first = asyncio.create_task(workers.settle())
            while not answers:
                await asyncio.sleep(0)
            later = [asyncio.create_task(workers.settle()) for _ in range(count)]
            await asyncio.sleep(0)
            answers[0].set_result(None)
            await first
            assert not any(one.done() for one in later)  # that round may have begun before them
            while len(answers) < 2:
                await asyncio.sleep(0)
            answers[1].set_result(None)
            await asyncio.gather(*later)

    asyncio.run(refuse(20))
    assert len(questions) == 2


def test_the_workers_end_with_the_http_process(directory: Path) -> None:
    """Also if it is killed; a client of theirs is told."""
    server = Workers(directory, 2)
    client = Client(server)
    workers = server.workers
    server.loop.pauses_behind = 3
    stream = client.begin("POST", COMPLETIONS, **LONG)
    text = ""
    while "".join(re.findall('"text":"([^"]*)"', text)) != "hel":
        text += stream.read1().decode()
    server.process.kill()
    assert b'"error"' in stream.read()
    eventually(lambda: not any(map(running, workers)))
    server.loop.close()


def test_a_process_without_a_file_for_a_connection_serves_later(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The HTTP process, and a worker, whose connection is closed then."""
    server = Workers(directory, 2)
    errors = ""

    def logged(words: str) -> bool:
        nonlocal errors
        errors += capfd.readouterr().err
        return words in errors

    for process, words in (
        (server.process.pid, "cannot be accepted"),
        (server.workers[0], "no file is left"),
    ):
        limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (0, limits[1]))
        with contextlib.ExitStack() as opened:
            for _ in range(2):  # one for each worker
                opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            eventually(lambda words=words: logged(words))  # type: ignore[misc]
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
        with clients_of(server, 2) as clients:
            assert {client.worker for client in clients} == {1, 2}
    server.close()


def test_a_conflict_is_final_only_when_the_workers_have_told_what_happened() -> None:
    told = []

    async def go_on(name: Name) -> Beginning:
        if not told:
            raise RequestError(ErrorKind.CONFLICT, "another turn runs")
        return Beginning()

    async def settle() -> None:
        told.append("the client of that turn has hung up")

    histories = Mock(go_on=go_on)
    shared = SharedServices(Mock(), Mock(), Mock(), histories, Mock(), None, settle)
    name = Name("owner", "mine")
    assert asyncio.run(WorkerCalls(shared, Mock()).go_on(name)) == Beginning()
