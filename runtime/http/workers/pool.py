"""The workers of the HTTP process (`worker.py`): starts them, and answers their calls.

All that they share is here, once: the engine's pipe and its metrics, the histories, the limits, the
grammar checkers. A worker that dies or hangs is replaced: what it held is released, and its
requests are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI
from starlette.types import Message as ASGIMessage

from ....scheduler.types import Applied, ErrorKind, Request, RequestError, RequestId, RowResult
from ...conversations.schema import Name
from ...conversations.sessions import SessionKey
from ...conversations.transcript import Message, Transcript
from ...conversations.turns import Beginning, TurnManager, TurnPlace
from ...frontend.engine_client import ClientGone, EngineClient, OutputStream
from ...frontend.request_builder import GrammarChecks
from ...messages import Ready
from ..connection_limits import allow_connections
from ..limits import OpenSequences
from ..server import CLOSING_SECONDS
from ..settings import HTTPSettings
from .channel import Channel
from .worker import REFUSED, SERVED, Answered, Forward, Worker, WorkerEngine

log = logging.getLogger(__name__)

RESTART_S = 1.0  # least time between two starts of a worker
END_SECONDS = CLOSING_SECONDS + 3.0  # for a worker to end, once it was told
LAST_SECONDS = 2.0  # for a process to exit, once its channel is closed
GIVEN_BYTES = 1 << 15  # some 40 connections wait for a worker that is busy; others get the next
RETRY_S = 0.01  # until a worker takes a connection
BEAT_S = 1.0  # between two questions to each worker whether it works
MOST_SILENT = 30  # beats without an answer; then the worker hangs
SETTLE_S = 1.0  # longest wait for what a worker has not told yet


class SharedServices(NamedTuple):
    """What the workers share. `app` answers the requests for it. `limit`: None if there is none.
    `settle` returns when the workers have told what happened before."""

    app: FastAPI
    client: EngineClient
    ready: Ready
    histories: TurnManager
    grammars: GrammarChecks
    limit: OpenSequences | None
    settle: Callable[[], Awaitable[None]]


class WorkerCalls:
    """Answers one worker, and holds what it has open."""

    def __init__(self, shared: SharedServices, channel: Channel):
        self._channel = channel
        self._shared = shared
        self._client = shared.client
        self._histories = shared.histories
        self._streams: dict[RequestId, OutputStream] = {}  # of requests that are not settled
        self._rows: list[RowResult] = []  # for the next message
        self._turns: set[bytes] = set()
        self._sessions: dict[int, ExitStack] = {}
        self._claims: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        client, histories, grammars = shared.client, shared.histories, shared.grammars
        channel.offer(
            self.submit_all,
            self.abort,
            self.finish,
            self.begin_chat,
            self.begin_completion,
            self.go_on,
            self.commit_turn,
            self.close_turn,
            self.begin_session,
            self.end_session,
            self.claim,
            self.release,
            self.answer,
        )
        channel.offer(client.tell, client.count_call, client.count_error)
        channel.offer(
            histories.check_quota,
            histories.find,
            histories.get,
            histories.say_once,
            histories.watch_prompt,
        )
        channel.offer(grammars.can_check, grammars.check)

    def close(self) -> None:
        """The worker is gone: nothing of it stays."""
        for stream in dict.fromkeys(self._streams.values()):
            stream.hang_up()
            stream.close()
        for turn in list(self._turns):
            self.close_turn(turn, array("i"), b"")
        for held in self._sessions.values():
            held.close()
        for client, sequences in self._claims.items():
            assert self._shared.limit is not None
            self._shared.limit.release(client, sequences)

    # -- the engine

    def submit_all(self, requests: list[Request], arrived: float) -> None:
        ids = [request.id for request in requests]
        try:
            stream = self._client.submit(requests, arrived)
        except RequestError as error:
            self._channel.tell(WorkerEngine.fail, ids, error)
            return
        self._streams |= dict.fromkeys(ids, stream)
        relay = asyncio.create_task(self._relay(stream, requests))
        self._tasks.add(relay)
        relay.add_done_callback(self._tasks.discard)

    def abort(self, request: RequestId) -> None:
        """The whole call is over: the worker aborts the others of its requests too."""
        stream = self._streams.pop(request, None)
        if stream is not None:
            stream.hang_up()
            stream.close()

    def finish(self, request: RequestId, tokens: int) -> None:
        stream = self._streams.pop(request, None)
        if stream is not None:
            stream.finish(request, tokens)

    async def _relay(self, stream: OutputStream, requests: Sequence[Request]) -> None:
        """Passes the outputs of these requests on to the worker."""
        unfinished = {request.id: request for request in requests}

        def take(outputs: list[RowResult]) -> bool:
            self._pass_on(outputs)
            for output in outputs:
                if output.finish is not None:
                    request = unfinished.pop(output.request)
                    if not request.confirm:
                        self._streams.pop(request.id, None)
            return not unfinished

        try:
            await stream.each(take)
        except ClientGone:
            pass  # with the worker, or its client
        except RequestError as error:
            self._channel.tell(WorkerEngine.fail, [request.id for request in requests], error)

    def _pass_on(self, outputs: list[RowResult]) -> None:
        """The outputs of all streams that have news go in one message."""
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._send_rows)
        self._rows += outputs

    def _send_rows(self) -> None:
        rows = self._rows
        self._rows = []
        self._channel.tell(WorkerEngine.take, Applied(rows=tuple(reversed(rows))))

    # -- the histories

    async def begin_chat(
        self,
        owner: str,
        names: Sequence[Name],
        conversation: Name | None,
        messages: Sequence[Message],
    ) -> Beginning:
        beginning = self._histories.begin_chat(owner, names, conversation, messages)
        return self._hold(await beginning)

    async def begin_completion(self, name: Name) -> Beginning:
        return self._hold(await self._histories.begin_completion(name))

    async def go_on(self, name: Name) -> Beginning:
        try:
            beginning = await self._histories.go_on(name)
        except RequestError as error:
            if error.kind is not ErrorKind.CONFLICT:
                raise
            await self._shared.settle()  # the client of the last turn may just have hung up
            beginning = await self._histories.go_on(name)
        return self._hold(beginning)

    def _hold(self, beginning: Beginning) -> Beginning:
        if beginning.opening is not None:
            turn = beginning.opening.turn
            self._turns.add(turn)
            if self._channel.closed.done():
                self.close_turn(turn, array("i"), b"")
        return beginning

    async def commit_turn(
        self, place: TurnPlace, whole: Transcript, salt: bytes, body: str | None, is_chat: bool
    ) -> None:
        await self._histories.commit_turn(place, whole, salt, body, is_chat)
        if place.opening is not None:
            self._turns.discard(place.opening.turn)

    def close_turn(self, turn: bytes, tokens: array[int], salt: bytes) -> None:
        self._turns.discard(turn)
        self._histories.close_turn(turn, tokens, salt)

    def begin_session(self, number: int, key: SessionKey, kv_name: str) -> None:
        self._sessions[number] = ExitStack()
        self._histories.open_session(key, kv_name, self._sessions[number])

    def end_session(self, number: int) -> None:
        self._sessions.pop(number).close()

    # -- limits, and all other requests

    async def claim(self, client: str, held: int, sequences: int, param: str | None) -> None:
        limit = self._shared.limit
        assert limit is not None
        await limit.claim(client, held, sequences, param)
        if self._channel.closed.done():
            limit.release(client, sequences - held)
        else:
            self._claims[client] += sequences - held

    def release(self, client: str, held: int) -> None:
        assert self._shared.limit is not None
        self._claims[client] -= held
        if not self._claims[client]:
            del self._claims[client]
        self._shared.limit.release(client, held)

    async def answer(self, scope: dict[str, Any], number: int) -> Answered:
        head: dict[str, Any] = {}
        answered = bytearray()

        async def send(message: ASGIMessage) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                answered += message.get("body", b"")

        receive = partial(self._channel.ask, Forward.receive, number)
        await self._shared.app(scope, receive, send)
        return Answered(head["status"], list(head["headers"]), bytes(answered))


class RunningWorker:
    """A worker's process and the channel to it, from its start.

    connections   the worker's open connections
    up            the worker takes connections
    silent        beats that it has not answered
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._giving, taking = socket.socketpair()
        self._giving.setblocking(False)
        self._giving.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, GIVEN_BYTES)
        with theirs, taking:
            files = theirs.fileno(), taking.fileno()
            words = [sys.executable, "-P", "-m", f"{__package__}.worker", *map(str, files)]
            self._process = subprocess.Popen(words, pass_fds=files, stdin=subprocess.DEVNULL)
        self._socket = ours
        self.channel = Channel()
        self.channel.offer(self.started, self.lose_connection, self.answer_beat)
        self.connections = 0
        self.up = False
        self.silent = 0

    async def connect(self) -> None:
        """Called first."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.channel, sock=self._socket)

    def started(self) -> None:
        self.up = True

    def lose_connection(self) -> None:
        self.connections -= 1

    def answer_beat(self) -> None:
        self.silent = 0

    @property
    def is_late(self) -> bool:
        return self.silent > 1

    def beat(self) -> None:
        """Called every BEAT_S. Kills a worker that hangs. Beats are counted, not seconds: after a
        pause of all processes it has time to answer."""
        if not self.up:
            return
        self.silent += 1
        if self.silent <= MOST_SILENT:
            self.channel.tell(Worker.beat)
        elif self._process.poll() is None:
            log.error("an HTTP worker does not answer: it is killed")
            self._process.kill()

    def give(self, connection: socket.socket, mark: bytes) -> bool:
        """Gives an accepted connection to the worker: SERVED or REFUSED. Returns False if it takes
        none now."""
        try:
            socket.send_fds(self._giving, [mark], [connection.fileno()])
        except OSError:  # it is full, or gone, or too many are on their way
            return False
        self.connections += 1
        return True

    def exit_status(self) -> int:
        """Waits for the process, whose channel is closed: it ends on its own, unless it hangs."""
        self._giving.close()
        try:
            return self._process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Workers:
    """As many workers as `--api-server-count` says. Each connection at `listener` goes to the one
    that has the fewest."""

    def __init__(self, listener: socket.socket, settings: HTTPSettings):
        self._listener = listener
        listener.setblocking(False)
        self._most = allow_connections(settings.max_connections)
        self._settings = settings
        self._numbers = itertools.count(1)
        self._shared: asyncio.Future[SharedServices | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._ending = asyncio.Event()
        self._running: dict[int, RunningWorker] = {}  # by their numbers
        self._replaced = False  # one of the first workers
        # rounds of `settle` that have begun
        self._settling = asyncio.Lock()
        self._rounds = 0

    def open(self, shared: SharedServices) -> None:
        """The engine is ready."""
        self._shared.set_result(shared)

    def end(self) -> None:
        """The engine has ended, or did not start. Idempotent."""
        self._ending.set()
        if not self._shared.done():
            self._shared.set_result(None)

    async def serve(self) -> None:
        """Returns when all workers have ended, after `end`."""
        accepting = asyncio.create_task(self._accept())
        keeping = asyncio.gather(*[self._keep_worker() for _ in range(self._settings.workers)])
        ending = asyncio.create_task(self._ending.wait())
        beating = asyncio.create_task(self._beat())
        await asyncio.wait((accepting, keeping, ending), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            accepting.result()  # raises the reason
        accepting.cancel()
        beating.cancel()
        self._listener.close()
        await keeping

    async def settle(self) -> None:
        """Returns when the workers have told what happened before. Calls that wait at the same time
        share one round of questions, which begins after them."""
        begun = self._rounds
        async with self._settling:
            if self._rounds > begun:
                return
            self._rounds += 1
            asking = [worker.channel.ask(Worker.settle) for worker in self._running.values()]
            with contextlib.suppress(TimeoutError):
                # one that dies meanwhile has nothing to tell
                await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), SETTLE_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for worker in self._running.values():
                worker.beat()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._all_started():  # the first one would get all that wait
            await asyncio.sleep(RETRY_S)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                log.error("a connection cannot be accepted: %s", error)
                await asyncio.sleep(RESTART_S)
                continue
            with connection:
                while not self._ending.is_set() and not self._give(connection):
                    await asyncio.sleep(RETRY_S)

    def _all_started(self) -> bool:
        """True also if a worker has died before."""
        up = sum(worker.up for worker in self._running.values())
        return self._replaced or up == self._settings.workers

    def _give(self, connection: socket.socket) -> bool:
        """Returns False if no worker takes a connection now."""
        workers = sorted(
            self._running.values(), key=lambda worker: (worker.is_late, worker.connections)
        )
        is_full = sum(worker.connections for worker in workers) >= self._most
        mark = REFUSED if is_full else SERVED
        return any(worker.up and worker.give(connection, mark) for worker in workers)

    async def _keep_worker(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                worker = RunningWorker()
            except OSError as error:
                log.error("an HTTP worker cannot be started: %s", error)
            else:
                status = await self._run_worker(worker, next(self._numbers))
                if not self._ending.is_set():
                    log.error(
                        "an HTTP worker has ended with status %d: its clients are cut off, and "
                        "another one starts",
                        status,
                    )
            self._replaced = True
            if not self._ending.is_set():
                pause = began + RESTART_S - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), max(0.0, pause))

    async def _run_worker(self, worker: RunningWorker, number: int) -> int:
        """Returns its exit status when it has ended."""
        await worker.connect()
        channel = worker.channel
        self._running[number] = worker
        channel.tell(Worker.configure, self._settings, number)
        await asyncio.wait((self._shared, channel.closed), return_when=asyncio.FIRST_COMPLETED)
        shared = self._shared.result() if self._shared.done() else None
        if shared is None:
            await self._until_ended(channel)
        else:
            calls = WorkerCalls(shared, channel)
            channel.tell(Worker.open, shared.ready)
            await self._until_ended(channel)
            calls.close()
        del self._running[number]
        return await asyncio.to_thread(worker.exit_status)

    async def _until_ended(self, channel: Channel) -> None:
        """Returns when the worker is gone, or has not ended in time."""
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait((ending, channel.closed), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        channel.tell(Worker.end)
        await asyncio.wait((channel.closed,), timeout=END_SECONDS)
        channel.close()
