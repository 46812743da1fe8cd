"""The HTTP process's end of the pipe to the engine loop: sends requests, receives their outputs.

Two daemon threads own the pipe, one for each direction, so neither a full pipe nor a long step
blocks the event loop. All other code here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ...scheduler.types import (
    Erasure,
    ErrorKind,
    Request,
    RequestError,
    RequestId,
    Residency,
    RowResult,
)
from ..messages import (
    Abort,
    Draining,
    Erased,
    Fatal,
    Finish,
    Forget,
    Fork,
    FromHTTP,
    Keep,
    Look,
    StepMessage,
    Submit,
)
from ..observe.metrics import Metrics
from ..observe.residency import ResidencyView


class ClientGone(Exception):
    """The HTTP client has hung up: its reply is no longer needed."""


class OutputStream:
    """The outputs of one HTTP call's requests. The caller of `submit` must close it in any case.

    A request is settled when its last output has arrived and, with `confirm`, its length is
    confirmed.
    """

    def __init__(self, client: EngineStreams, requests: Sequence[Request]):
        self._client = client
        self._unsettled = {request.id: request for request in requests}
        self._outputs: list[RowResult] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._take: Callable[[list[RowResult]], bool] | None = None  # of `each`
        self._done: asyncio.Future[None] | None = None

    async def next(self) -> list[RowResult]:
        """Returns the outputs since the last call, at least one, in order of arrival. Only allowed
        while a request is unfinished.

        Raises RequestError if a request was refused (TOO_MANY: queue full, ...) or the engine has
        ended (INTERNAL, UNAVAILABLE), and ClientGone after `hang_up`.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        outputs = self._outputs
        self._outputs = []
        return outputs

    async def each(self, take: Callable[[list[RowResult]], bool]) -> None:
        """Calls `take` with the outputs as `next` returns them, until it returns True. No task is
        woken for that: `take` is called by the event loop, and must not wait.

        Raises as `next`, and the errors of `take`.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._take = take
        try:
            self.deliver()
            await self._done
        finally:
            self._take = None

    def deliver(self) -> None:
        """Called by EngineClient for a stream with news (`announce`)."""
        if self._take is None or self._done is None or self._done.done():
            return
        outputs = self._outputs
        self._outputs = []
        try:
            if outputs and self._take(outputs):
                self._done.set_result(None)
            elif self._error is not None:
                self._done.set_exception(self._error)
        except StopIteration as error:  # no future carries one
            self._done.set_exception(RuntimeError(f"a result cannot be taken: {error!r}"))
        except BaseException as error:  # carried to the task in `each`, which raises it
            self._done.set_exception(error)

    def finish(self, request: RequestId, tokens: int) -> None:
        """Confirms once that the reply of a request with `confirm` is its first `tokens` tokens. It
        may have been refused meanwhile."""
        self._unsettled.pop(request, None)
        self._client.finish(request, tokens)

    def hang_up(self) -> None:
        """The HTTP client is gone: `next` raises ClientGone."""
        self.fail(ClientGone())

    def close(self) -> None:
        """Aborts requests that are not settled. Idempotent."""
        for request in self._unsettled:
            self._client.abort(request)
        self._unsettled.clear()

    def push(self, result: RowResult) -> None:
        """Called by EngineClient with one more result."""
        request = self._unsettled.get(result.request)
        if result.finish is not None and request is not None and not request.confirm:
            del self._unsettled[request.id]
        self._outputs.append(result)
        self._announce()

    def fail(self, error: Exception) -> None:
        """Called by EngineClient when no more outputs come; `next` raises `error` after the outputs
        that are already here."""
        if self._error is None:
            self._error = error
        self._announce()

    def refuse(self, request: RequestId, error: RequestError) -> None:
        """Called by EngineClient when the loop does not serve this request: the whole call
        fails."""
        self._unsettled.pop(request, None)
        self.fail(error)

    def _announce(self) -> None:
        if self._take is None:
            self._news.set()
        else:
            self._client.announce(self)


@dataclass(slots=True)
class _Open:
    """A request whose last output has not arrived. `since`: time of its latest token, or of its
    arrival; perf_counter seconds.

    `counts`: True unless another choice of the same prompt counts the prompt already.
    """

    stream: OutputStream
    since: float
    counts: bool
    started: bool = False


class EngineStreams(ABC):
    """The engine for the code that answers calls: requests go in, and streams of outputs come out.
    Must be made inside a running event loop. Its ids begin with `first_id`.

    A subclass sends its messages to the loop, or to the process that is connected to the loop.
    """

    def __init__(self, first_id: int = 1):
        self._event_loop = asyncio.get_running_loop()
        self._ids = itertools.count(first_id)
        self._news: dict[OutputStream, None] = {}  # streams to deliver, in their order
        self._fault: RequestError | None = None  # the reason why no more requests are served

    def new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def submit(self, requests: Sequence[Request], arrived: float) -> OutputStream:
        """Sends the requests of one HTTP call, which arrived at time `arrived` (time.perf_counter's
        seconds).

        Raises RequestError (INTERNAL, UNAVAILABLE) if the engine has ended.
        """
        if self._fault is not None:
            raise self._fault
        stream = OutputStream(self, requests)
        self._send_requests(stream, requests, arrived)
        return stream

    @abstractmethod
    def abort(self, request: RequestId) -> None:
        """Aborts the request: no more outputs of it arrive. It may have ended meanwhile."""

    @abstractmethod
    def finish(self, request: RequestId, tokens: int) -> None:
        """The reply ends after its first `tokens` tokens (`messages.Finish`)."""

    @abstractmethod
    def tell(self, message: Fork | Keep) -> None:
        """Sends a change of a conversation, after everything that was sent before."""

    @abstractmethod
    def count_call(self, seconds: float, queued: Sequence[float]) -> None:
        """As `Metrics.ended`."""

    @abstractmethod
    def count_error(self, status: int) -> None:
        """Counts an answer with a status from 400 to 499."""

    def announce(self, stream: OutputStream) -> None:
        """Delivers the stream's news soon, together with those of all messages that wait."""
        if not self._news:
            self._event_loop.call_soon(self._deliver)
        self._news[stream] = None

    def _deliver(self) -> None:
        streams = self._news
        self._news = {}
        for stream in streams:
            stream.deliver()

    @abstractmethod
    def _send_requests(
        self, stream: OutputStream, requests: Sequence[Request], arrived: float
    ) -> None:
        """Sends the requests, whose outputs go to the stream."""


class EngineClient(EngineStreams):
    """Connects to the engine loop. Must be made inside a running event loop; it owns `connection`
    from then on.

    `closed` is set when the engine has ended and every open stream has got the reason.
    """

    def __init__(self, connection: Connection):
        super().__init__()
        self.metrics = Metrics()
        self.kv_map = ResidencyView()
        self.closed = asyncio.Event()
        self._open: dict[RequestId, _Open] = {}
        self._draining = False
        self._told = asyncio.Event()  # set when a part of `kv_map` arrives
        # rounds of `refresh_all` that have begun
        self._looking = asyncio.Lock()
        self._rounds = 0
        self._forgetting: deque[asyncio.Future[Erasure]] = deque()  # in the order of their answers
        self._outbox: SimpleQueue[FromHTTP | list[Submit] | None] = SimpleQueue()
        for name, work in (("engine-reader", self._read), ("engine-writer", self._write)):
            threading.Thread(target=work, args=(connection,), name=name, daemon=True).start()

    @property
    def healthy(self) -> bool:
        return self._fault is None

    @property
    def accepting(self) -> bool:
        """Whether the loop takes new requests."""
        return self.healthy and not self._draining

    def abort(self, request: RequestId) -> None:
        if self._open.pop(request, None) is not None:
            self.metrics.finished["abort"] += 1
        self._outbox.put(Abort(request))

    def finish(self, request: RequestId, tokens: int) -> None:
        self._outbox.put(Finish(request, tokens))

    def count_call(self, seconds: float, queued: Sequence[float]) -> None:
        self.metrics.ended(seconds, queued)

    def count_error(self, status: int) -> None:
        self.metrics.client_errors[str(status)] += 1

    def refresh(self) -> None:
        """Asks for an update of `kv_map`, unless the last one is recent. Called while the page is
        open."""
        if (start := self.kv_map.due(time.monotonic())) is not None:
            self._outbox.put(Look(start))

    async def refresh_all(self) -> None:
        """Returns when all of `kv_map` is up to date, or at once if the engine has ended. Calls
        that wait at the same time share one round of answers, which begins after them."""
        begun = self._rounds
        async with self._looking:
            if self._rounds > begun:
                return
            self._rounds += 1
            while self.healthy:
                self._told.clear()
                self._outbox.put(Look(self.kv_map.following))
                await self._told.wait()
                if not self.kv_map.following:
                    return

    def tell(self, message: Fork | Keep) -> None:
        self._outbox.put(message)

    def forget(self, message: Forget) -> asyncio.Future[Erasure]:
        """Erases the conversation's own KV. The future's result: whether it cannot be read any
        more; REFUSED too if the engine ended before its answer."""
        erased: asyncio.Future[Erasure] = self._event_loop.create_future()
        if self._fault is not None:
            erased.set_result(Erasure.REFUSED)
        else:
            self._forgetting.append(erased)
            self._outbox.put(message)
        return erased

    def _write(self, connection: Connection) -> None:
        """Thread: sends in order, then closes the pipe. A broken pipe is reported by the reader."""
        try:
            while (message := self._outbox.get()) is not None:
                connection.send(message)
            connection.close()
        except OSError:
            pass

    def _read(self, connection: Connection) -> None:
        """Thread: passes each message to the event loop. At its end all waiting calls end too."""
        message = None
        try:
            while not isinstance(message, Fatal):
                message = connection.recv()
                self._event_loop.call_soon_threadsafe(self._receive, message)
        except (EOFError, OSError):
            pass
        finally:
            self._event_loop.call_soon_threadsafe(self._end)

    def _receive(self, message: StepMessage | Draining | Residency | Erased | Fatal) -> None:
        if isinstance(message, Fatal):
            self._fail(
                RequestError(ErrorKind.INTERNAL, f"the engine has stopped: {message.reason}")
            )
            return
        if isinstance(message, Draining):
            self._draining = True
            return
        if isinstance(message, Residency):
            self.kv_map.take(message)
            self._told.set()
            return
        if isinstance(message, Erased):
            self._forgotten(message.erasure)
            return
        now = time.perf_counter()
        for result in message.applied.results():
            self._take(result, now)
        self.metrics.stats = message.stats or self.metrics.stats
        self.metrics.copied = message.copied or self.metrics.copied
        self.metrics.disk = message.disk or self.metrics.disk
        self.metrics.kv_events = message.kv_events or self.metrics.kv_events
        self.metrics.shared = message.shared or self.metrics.shared
        self.metrics.loop = message.loop or self.metrics.loop

    def _take(self, result: RowResult, now: float) -> None:
        request = self._open.get(result.request)
        if request is None:
            return  # it was aborted meanwhile
        if result.error is not None:
            del self._open[result.request]
            self.metrics.finished["refused"] += 1
            request.stream.refuse(result.request, result.error)
            return
        if result.usage is not None and request.counts:
            self.metrics.count_prompt(result.usage)
        if result.tokens:
            self.metrics.generation_tokens += len(result.tokens)
            if request.started:
                self.metrics.inter_token_latency.observe(now - request.since)
            else:
                self.metrics.time_to_first_token.observe(now - request.since)
            request.since = now
            request.started = True
        if result.finish is not None:
            del self._open[result.request]
            self.metrics.finished[result.finish] += 1
        request.stream.push(result)

    def _send_requests(
        self, stream: OutputStream, requests: Sequence[Request], arrived: float
    ) -> None:
        for request in requests:
            self._open[request.id] = _Open(stream, arrived, request.choice == 0)
        self._outbox.put([Submit(request) for request in requests])

    def _fail(self, fault: RequestError) -> None:
        """Ends every open request, and every later one, with `fault`."""
        if self._fault is None:
            self._fault = fault
        for request in self._open.values():
            request.stream.fail(self._fault)
        self._open.clear()
        while self._forgetting:
            self._forgotten(Erasure.REFUSED)
        self._told.set()

    def _forgotten(self, erasure: Erasure) -> None:
        erased = self._forgetting.popleft()
        if not erased.done():  # cancelled, with the call that waited for it
            erased.set_result(erasure)

    def _end(self) -> None:
        self._fail(RequestError(ErrorKind.UNAVAILABLE, "the engine has shut down"))
        self._outbox.put(None)
        self.closed.set()
