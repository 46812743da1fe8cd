"""A worker of the HTTP process: it has connections of its own, and parses, tokenizes, formats and
writes. All that the workers share is in the HTTP process, which it calls over a channel.

`python -m pensieve.runtime.http.workers.worker CHANNEL CONNECTIONS` serves the connections that the
HTTP process sends through the socket CONNECTIONS, until the HTTP process ends it, or is gone. Both
are file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from ....scheduler.types import Applied, ErrorKind, Request, RequestError, RequestId
from ...conversations.schema import Name, StoredConversation
from ...conversations.sessions import Prompt, SessionKey
from ...conversations.transcript import Message, Transcript
from ...conversations.turns import Beginning, Stored, TurnPlace, Turns
from ...frontend.engine_client import EngineStreams, OutputStream
from ...frontend.errors import error_response
from ...frontend.request_builder import GrammarChecks
from ...messages import Fork, Keep, Ready
from ...observe.logs import configure_logging
from ...system import print_stacks_on_signal
from ...text.tokenizer import Tokenizer
from ..app import add_generation, add_layers
from ..limits import OpenSequences
from ..server import FrontDoor, HTTPServer, freeze_objects, load_tokenizer, open_tracing
from ..settings import HTTPSettings
from .channel import ENDED, Channel

if TYPE_CHECKING:
    from ...frontend.otel import Tracing  # needs the extra `otel`

log = logging.getLogger(__name__)

HANG_UP_STEPS = 10  # of the event loop, from the end of a connection to the end of its call
FIRST_ID_BITS = 40  # a worker's ids of requests are its number, then a count
# with a connection: to be served, or to be told that there are too many
SERVED, REFUSED = b"+", b"-"
FORWARDED = (
    "type",
    "asgi",
    "http_version",
    "server",
    "client",
    "scheme",
    "method",
    "root_path",
    "path",
    "raw_path",
    "query_string",
    "headers",
)
"""Fields of a scope that are plain data."""


class Answered(NamedTuple):
    """The whole answer of the HTTP process to a request that it was given."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class MainCalls:
    """Calls of a worker to the HTTP process that have no other pattern."""

    def submit_all(self, requests: list[Request], arrived: float) -> None:
        """As `EngineStreams.submit`."""

    def begin_session(self, number: int, key: SessionKey, kv_name: str) -> None:
        """As `Turns.open_session`, under this number."""

    def end_session(self, number: int) -> None:
        """The request of the session is over."""

    def started(self) -> None:
        """The worker takes connections."""

    def lose_connection(self) -> None:
        """One of its connections has ended."""

    def answer_beat(self) -> None:
        """The worker does not hang."""

    async def answer(self, scope: dict[str, Any], number: int) -> Answered:
        """Answers a request for something that all workers share. `Forward.receive` has its body
        under this number."""
        raise NotImplementedError


class WorkerEngine(EngineStreams):
    """The engine, by way of the HTTP process, which counts all that passes."""

    def __init__(self, channel: Channel, number: int):
        super().__init__((number << FIRST_ID_BITS) + 1)
        self._channel = channel
        self._open: dict[RequestId, OutputStream] = {}

    def abort(self, request: RequestId) -> None:
        self._open.pop(request, None)
        self._channel.tell(EngineStreams.abort, request)

    def finish(self, request: RequestId, tokens: int) -> None:
        self._channel.tell(EngineStreams.finish, request, tokens)

    def tell(self, message: Fork | Keep) -> None:
        self._channel.tell(EngineStreams.tell, message)

    def count_call(self, seconds: float, queued: Sequence[float]) -> None:
        self._channel.tell(EngineStreams.count_call, seconds, queued)

    def count_error(self, status: int) -> None:
        self._channel.tell(EngineStreams.count_error, status)

    def take(self, applied: Applied) -> None:
        """Gives each stream its part of these results."""
        for result in applied.results():
            stream = self._open.get(result.request)
            if stream is None:
                continue  # it was aborted meanwhile
            if result.finish is not None:
                del self._open[result.request]
            stream.push(result)

    def fail(self, requests: Sequence[RequestId], error: RequestError) -> None:
        """The call with these requests fails."""
        for request in requests:
            stream = self._open.pop(request, None)
            if stream is not None:
                stream.fail(error)

    def end(self) -> None:
        """Every open request and every later one fails: the HTTP process is gone."""
        self._fault = RequestError(ErrorKind.UNAVAILABLE, ENDED)
        self.fail(list(self._open), self._fault)

    def _send_requests(
        self, stream: OutputStream, requests: Sequence[Request], arrived: float
    ) -> None:
        self._open |= {request.id: stream for request in requests}
        self._channel.tell(MainCalls.submit_all, list(requests), arrived)


class WorkerTurns(Turns):
    """The histories of the HTTP process. A call for a chat needs them twice: for its beginning and
    its commit."""

    def __init__(self, channel: Channel, tokenizer: Tokenizer | None):
        super().__init__(tokenizer)
        self._channel = channel
        self._sessions = itertools.count()

    async def begin_chat(
        self,
        owner: str,
        names: Sequence[Name],
        conversation: Name | None,
        messages: Sequence[Message],
    ) -> Beginning:
        return await self._channel.ask(Turns.begin_chat, owner, names, conversation, messages)

    async def begin_completion(self, name: Name) -> Beginning:
        return await self._channel.ask(Turns.begin_completion, name)

    async def go_on(self, name: Name) -> Beginning:
        return await self._channel.ask(Turns.go_on, name)

    async def check_quota(self, name: Name) -> None:
        await self._channel.ask(Turns.check_quota, name)

    async def find(self, name: Name) -> Stored:
        return await self._channel.ask(Turns.find, name)

    async def get(self, name: Name) -> StoredConversation:
        return await self._channel.ask(Turns.get, name)

    async def commit_turn(
        self, place: TurnPlace, whole: Transcript, salt: bytes, body: str | None, is_chat: bool
    ) -> None:
        await self._channel.ask(Turns.commit_turn, place, whole, salt, body, is_chat)

    def close_turn(self, turn: bytes, tokens: array[int], salt: bytes) -> None:
        self._channel.tell(Turns.close_turn, turn, tokens, salt)

    def open_session(self, key: SessionKey, kv_name: str, held: ExitStack) -> None:
        number = next(self._sessions)
        self._channel.tell(MainCalls.begin_session, number, key, kv_name)
        held.callback(self._channel.tell, MainCalls.end_session, number)

    def say_once(self, key: SessionKey, message: str) -> None:
        self._channel.tell(Turns.say_once, key, message)

    def watch_prompt(self, key: SessionKey, kv_name: str, prompt: Prompt) -> None:
        self._channel.tell(Turns.watch_prompt, key, kv_name, prompt)


class WorkerLimit(OpenSequences):
    """The count of the HTTP process."""

    def __init__(self, channel: Channel, most: int):
        super().__init__(most)
        self._channel = channel

    async def claim(self, client: str, held: int, sequences: int, param: str | None) -> None:
        await self._channel.ask(OpenSequences.claim, client, held, sequences, param)

    def release(self, client: str, held: int) -> None:
        self._channel.tell(OpenSequences.release, client, held)


class WorkerGrammars(GrammarChecks):
    """The checkers of the HTTP process."""

    def __init__(self, channel: Channel, ready: Ready):
        super().__init__(ready)
        self._channel = channel

    async def can_check(self) -> bool:
        return await self._channel.ask(GrammarChecks.can_check)

    async def check(self, grammar: str, param: str, owner: str) -> tuple[str, ...]:
        return await self._channel.ask(GrammarChecks.check, grammar, param, owner)


class Forward:
    """ASGI: `own` answers its paths; the HTTP process answers all others."""

    def __init__(self, own: FastAPI, channel: Channel):
        self._own = own
        self._paths = {route.path for route in own.routes if isinstance(route, Route)}
        self._channel = channel
        self._numbers = itertools.count()
        self._receives: dict[int, Receive] = {}  # of requests that the HTTP process answers
        channel.offer(self.receive)

    async def receive(self, number: int) -> ASGIMessage:
        """The next part of the request's body, as ASGI's `receive`."""
        return await self._receives[number]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._own if scope["path"] in self._paths else self._forward
        await app(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)
        self._receives[number] = receive
        plain = {name: scope[name] for name in FORWARDED if name in scope}
        try:
            answered = await self._channel.ask(MainCalls.answer, plain, number)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        finally:
            del self._receives[number]
        response = Response(answered.body, answered.status)
        response.raw_headers = answered.headers
        await response(scope, receive, send)


class Worker:
    """Serves until the HTTP process ends it, or is gone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.channel = Channel()
        self.channel.offer(self.configure, self.open, self.beat, self.settle, self.end)
        self._settings: asyncio.Future[tuple[HTTPSettings, int]] = self._loop.create_future()
        self._ready: asyncio.Future[Ready | None] = self._loop.create_future()
        self._ending = asyncio.Event()
        self._connecting: set[asyncio.Task[None]] = set()

    # -- called by the HTTP process

    def configure(self, settings: HTTPSettings, number: int) -> None:
        """The first call. `number`: of this worker; no other one has it, or had it."""
        self._settings.set_result((settings, number))

    def open(self, ready: Ready) -> None:
        """The engine is ready."""
        self._ready.set_result(ready)

    def beat(self) -> None:
        """Asks for a sign that this process does not hang."""
        self.channel.tell(MainCalls.answer_beat)

    async def settle(self) -> None:
        """When this is answered, all has been told that happened here before."""
        for _ in range(HANG_UP_STEPS):
            await asyncio.sleep(0)

    def end(self) -> None:
        """The engine has ended, or did not start. Idempotent."""
        self._ending.set()
        if not self._ready.done():
            self._ready.set_result(None)

    # -- serving

    async def serve(self, connections: socket.socket) -> None:
        """Returns when the last answer is written, or its time is over."""
        settings, number = await self._settings
        configure_logging(settings.log_format, settings.log_level)
        engine = WorkerEngine(self.channel, number)
        self.channel.offer(engine.take, engine.fail)
        gone = self._loop.create_task(self._end_with_channel(engine))
        door = FrontDoor()
        server = HTTPServer(door, settings)
        async with contextlib.AsyncExitStack() as behind:
            starter = asyncio.create_task(
                self._open_and_close(server, door, engine, settings, behind)
            )
            taker = asyncio.create_task(self._take_connections(server, door, connections))
            await server.serve(sockets=[])
            await starter
            taker.cancel()
        self.channel.close()
        await gone

    async def _take_connections(
        self, server: HTTPServer, door: FrontDoor, connections: socket.socket
    ) -> None:
        await server.up.wait()
        if self._ready.done():  # others serve: this one does not make clients wait
            await door.decided.wait()
        self.channel.tell(MainCalls.started)
        self._loop.add_reader(connections, self._take_connection, server, connections)

    def _take_connection(self, server: HTTPServer, connections: socket.socket) -> None:
        mark, files, _, _ = socket.recv_fds(connections, 1, 1)
        if not mark:  # the HTTP process is gone
            self._loop.remove_reader(connections)
            return
        lost = partial(self.channel.tell, MainCalls.lose_connection)
        if not files:  # this process may open no more, so the connection is closed
            log.error("no file is left for a connection (ulimit -n)")
            self.channel.tell(MainCalls.lose_connection)
            return
        connecting = self._loop.create_task(
            server.connect(socket.socket(fileno=files[0]), mark == REFUSED, lost)
        )
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)

    async def _end_with_channel(self, engine: WorkerEngine) -> None:
        await self.channel.closed
        engine.end()
        self.end()

    async def _open_and_close(
        self,
        server: HTTPServer,
        door: FrontDoor,
        engine: WorkerEngine,
        settings: HTTPSettings,
        behind: contextlib.AsyncExitStack,
    ) -> None:
        """Opens the door when the engine is ready, and ends the server when the engine has ended.
        `behind` gets the objects to close after the last request."""
        try:
            if (ready := await self._ready) is not None:
                tokenizer = await load_tokenizer(ready, settings)
                tracing = open_tracing(ready, settings, behind)
                app = create_worker_app(engine, self.channel, ready, tokenizer, settings, tracing)
                freeze_objects()
                door.open(Forward(app, self.channel))
                await self._ending.wait()
        finally:
            door.close()
            server.should_exit = True


def create_worker_app(
    engine: WorkerEngine,
    channel: Channel,
    ready: Ready,
    tokenizer: Tokenizer | None,
    settings: HTTPSettings,
    tracing: Tracing | None,
) -> FastAPI:
    """Returns the part of `create_app`'s application that a worker serves."""
    most = settings.max_requests_per_client
    limit = WorkerLimit(channel, most) if most is not None else None
    turns = WorkerTurns(channel, tokenizer)
    grammars = WorkerGrammars(channel, ready)
    app = FastAPI(openapi_url=None)
    add_layers(app, settings, limit, engine.count_error)
    add_generation(app, engine, ready, tokenizer, settings, turns, tracing, grammars)
    return app


async def _serve(channel: socket.socket, connections: socket.socket) -> None:
    worker = Worker()
    await asyncio.get_running_loop().create_connection(lambda: worker.channel, sock=channel)
    await worker.serve(connections)


def main(words: Sequence[str]) -> None:
    channel, connections = map(int, words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print_stacks_on_signal()
    asyncio.run(_serve(socket.socket(fileno=channel), socket.socket(fileno=connections)))


if __name__ == "__main__":
    main(sys.argv[1:])
