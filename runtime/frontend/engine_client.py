"""The HTTP process's side of the pipe to the engine loop: requests go out, their outputs come back.

Two daemon threads own the pipe, one for each direction, so that neither a full pipe nor a long step ever blocks the
event loop. Everything else here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ...scheduler.types import Applied, Output, Request, RequestError, RequestId, Residency
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
    """The HTTP client has hung up: nobody waits for this reply any more."""


def outputs(news: Applied | StepMessage) -> Iterator[Output]:
    """What a step brought each request, at most one output a request."""
    events = {event.request: event for event in news.events}
    for number in dict.fromkeys((*news.logprobs, *news.prompt_logprobs)):
        event = events.get(RequestId(number)) or Output(RequestId(number))
        own = news.logprobs.get(number)
        events[event.request] = replace(
            event, logprobs=(own,) if own else (), prompt_logprobs=news.prompt_logprobs.get(number, ())
        )
    # Prompts come behind the rows that generate: from the end, so that a first token waits for no other stream's.
    for number, token in zip(reversed(news.requests), reversed(news.tokens), strict=True):
        request = RequestId(number)
        known = events.pop(request, None)
        yield Output(request, (token,)) if known is None else replace(known, tokens=(token,))
    yield from events.values()


class OutputStream:
    """What arrives for the requests of one HTTP call. Whoever submitted them closes it, whatever happened.

    A request is settled when its last output has arrived and, with `confirm`, its length is confirmed.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]):
        self._client = client
        self._unsettled = {request.id: request for request in requests}
        self._outputs: list[Output] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def next(self) -> list[Output]:
        """Outputs since the last call, at least one, in order of arrival. Call it while a request is unfinished.

        Raises RequestError if a request was refused (429 queue full, ...) or the engine has ended (500, 503), and
        ClientGone after `hang_up`.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs

    def finish(self, request: RequestId, tokens: int) -> None:
        """Confirms a request with `confirm`, once: its reply is its first `tokens` tokens."""
        del self._unsettled[request]
        self._client.finish(request, tokens)

    def hang_up(self) -> None:
        """Whoever waits in `next` learns that the HTTP client is gone."""
        self.fail(ClientGone())

    def close(self) -> None:
        """Aborts what is not settled. Idempotent."""
        for request in self._unsettled:
            self._client.abort(request)
        self._unsettled.clear()

    def push(self, output: Output) -> None:
        """For EngineClient: one more output."""
        request = self._unsettled.get(output.request)
        if output.finish is not None and request is not None and not request.confirm:
            del self._unsettled[request.id]
        self._outputs.append(output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """For EngineClient: nothing more comes; `error` follows the outputs that are already here."""
        if self._error is None:
            self._error = error
        self._news.set()

    def refuse(self, request: RequestId, error: RequestError) -> None:
        """For EngineClient: the loop does not serve this request, so the whole call fails."""
        self._unsettled.pop(request, None)
        self.fail(error)


@dataclass(slots=True)
class _Open:
    """A request whose last output has not arrived. `since`: its latest token, or its arrival; perf_counter seconds.

    `counts`: its prompt is not that of another choice.
    """

    stream: OutputStream
    since: float
    counts: bool
    started: bool = False


class EngineClient:
    """Speaks with the engine loop. To be made inside a running event loop; `connection` is its own from then on.

    `closed` is set when the engine has ended and every open stream has been told why.
    """

    def __init__(self, connection: Connection):
        self.metrics = Metrics()
        self.kv_map = ResidencyView()
        self.closed = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._open: dict[RequestId, _Open] = {}
        self._fault: RequestError | None = None  # why nothing can be served any more
        self._draining = False
        self._told = asyncio.Event()  # something of `kv_map`
        self._forgetting: deque[asyncio.Future[bool]] = deque()  # in the order in which they will be answered
        self._outbox: SimpleQueue[FromHTTP | None] = SimpleQueue()
        for name, work in (("engine-reader", self._read), ("engine-writer", self._write)):
            threading.Thread(target=work, args=(connection,), name=name, daemon=True).start()

    @property
    def healthy(self) -> bool:
        return self._fault is None

    @property
    def accepting(self) -> bool:
        """Whether the loop takes new requests."""
        return self.healthy and not self._draining

    def new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def submit(self, requests: Sequence[Request], arrived: float) -> OutputStream:
        """Sends the requests of one HTTP call, which `arrived` at that time (time.perf_counter's seconds).

        Raises RequestError (500, 503) if the engine has ended.
        """
        if self._fault is not None:
            raise self._fault
        stream = OutputStream(self, requests)
        for request in requests:
            self._open[request.id] = _Open(stream, arrived, request.choice == 0)
            self._outbox.put(Submit(request))
        return stream

    def abort(self, request: RequestId) -> None:
        """Nothing more is heard of this request. It may have ended meanwhile."""
        if self._open.pop(request, None) is not None:
            self.metrics.finished["abort"] += 1
        self._outbox.put(Abort(request))

    def finish(self, request: RequestId, tokens: int) -> None:
        """The reply ends after its first `tokens` tokens (`messages.Finish`)."""
        self._outbox.put(Finish(request, tokens))

    def refresh(self) -> None:
        """Somebody looks at `kv_map`: it is brought up to date, at most so often."""
        if (start := self.kv_map.due(time.monotonic())) is not None:
            self._outbox.put(Look(start))

    async def refresh_all(self) -> None:
        """Brings all of `kv_map` up to date. Returns at once if the engine has ended."""
        while self.healthy:
            self._told.clear()
            self._outbox.put(Look(self.kv_map.following))
            await self._told.wait()
            if not self.kv_map.following:
                return

    def tell(self, message: Fork | Keep) -> None:
        """What happened to a conversation; behind everything that was sent before."""
        self._outbox.put(message)

    def forget(self, message: Forget) -> asyncio.Future[bool]:
        """What was the conversation's own is to be erased. The future's result: whether nobody can read it any more;
        False if the disk refused to erase something, or the engine has ended before it told."""
        erased: asyncio.Future[bool] = self._event_loop.create_future()
        if self._fault is not None:
            erased.set_result(False)
        else:
            self._forgetting.append(erased)
            self._outbox.put(message)
        return erased

    def _write(self, connection: Connection) -> None:
        """Thread: sends in order, then closes the pipe. A broken pipe is the reader's to report."""
        try:
            while (message := self._outbox.get()) is not None:
                connection.send(message)
            connection.close()
        except OSError:
            pass

    def _read(self, connection: Connection) -> None:
        """Thread: hands each message to the event loop. However it ends, nobody is left waiting."""
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
            self._fail(RequestError(500, f"the engine has stopped: {message.reason}"))
            return
        if isinstance(message, Draining):
            self._draining = True
            return
        if isinstance(message, Residency):
            self.kv_map.take(message)
            self._told.set()
            return
        if isinstance(message, Erased):
            self._forgotten(message.wholly)
            return
        now = time.perf_counter()
        for output in outputs(message):
            self._take(output, now)
        for refusal in message.refusals:
            refused = self._open.pop(refusal.request, None)
            if refused is not None:
                self.metrics.finished["refused"] += 1
                refused.stream.refuse(refusal.request, refusal.error)
        self.metrics.stats = message.stats or self.metrics.stats
        self.metrics.copied = message.copied or self.metrics.copied
        self.metrics.disk = message.disk or self.metrics.disk
        self.metrics.loop = message.loop or self.metrics.loop

    def _take(self, output: Output, now: float) -> None:
        request = self._open.get(output.request)
        if request is None:
            return  # it was aborted meanwhile
        if output.usage is not None and request.counts:
            self.metrics.count_prompt(output.usage)
        if output.tokens:
            self.metrics.generation_tokens += len(output.tokens)
            if request.started:
                self.metrics.inter_token_latency.observe(now - request.since)
            else:
                self.metrics.time_to_first_token.observe(now - request.since)
            request.since, request.started = now, True
        if output.finish is not None:
            del self._open[output.request]
            self.metrics.finished[output.finish] += 1
        request.stream.push(output)

    def _fail(self, fault: RequestError) -> None:
        """Every open request ends with `fault`, and so does every later one."""
        if self._fault is None:
            self._fault = fault
        for request in self._open.values():
            request.stream.fail(self._fault)
        self._open.clear()
        while self._forgetting:
            self._forgotten(False)
        self._told.set()

    def _forgotten(self, wholly: bool) -> None:
        erased = self._forgetting.popleft()
        if not erased.done():  # cancelled, with whoever waited
            erased.set_result(wholly)

    def _end(self) -> None:
        self._fail(RequestError(503, "the engine has shut down"))
        self._outbox.put(None)
        self.closed.set()
