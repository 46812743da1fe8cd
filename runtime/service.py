"""The engine loop behind a pipe: takes requests, runs steps, sends what they bring.

    receive  ->  EngineLoop.step  ->  send

The next step is planned shortly before the device needs it (`pace`): until then requests are received.

Two threads move messages between the HTTP process's pipe and two queues, so the loop never waits for a client. It ends
when it is drained, when the HTTP process is gone, or with the exception of a broken invariant, which every client is
told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ..scheduler.scheduler import Scheduler
from ..scheduler.step_timing import StepTiming
from ..scheduler.turns.conversations import common_prefix
from ..scheduler.types import Applied, FinishReason, Output, Request, RequestError, RequestId
from .executor import Executor
from .gc_control import GarbageCollector
from .loop import EngineLoop
from .messages import (
    Abort,
    Drain,
    Draining,
    Erased,
    Fatal,
    Finish,
    Forget,
    Fork,
    FromHTTP,
    Keep,
    Look,
    Ready,
    Refusal,
    StepMessage,
    Submit,
    ToHTTP,
)
from .observe.chrome_trace import TraceFile
from .observe.loop_stats import LoopCounters

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
LOOKED_AT = 32_768  # chunks for one `Look`: a millisecond or two
LONGEST_WAIT_S = 1.0  # a signal that comes between the last look for one and a wait is heard when that ends
LAST_WORDS_S = 15.0  # for the HTTP process to take what was said to it, once all is over
STUCK = "the reply's grammar cannot be followed any further: it is too complex for a text of this length"
IDLE_CHECK_S = 1.0  # after so long without anything to do the books are checked, once


class Compiled(NamedTuple):
    """The grammar of a request is, for whom it was submitted. From a thread that compiles to the loop."""

    request: Request
    outcome: Future[Any]


class Service:
    """`connection` is the HTTP process's pipe; the scheduler, the executor and the trace are this loop's own from here
    on."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connection: Connection,
        pace: StepTiming,
        trace: TraceFile | None = None,
    ):
        self._scheduler, self._executor = scheduler, executor
        self._inbox: SimpleQueue[FromHTTP | Compiled] = SimpleQueue()
        self._outbox: SimpleQueue[ToHTTP | None] = SimpleQueue()
        self._reader = threading.Thread(target=_read, args=(connection, self._inbox), name="inbox", daemon=True)
        self._writer = threading.Thread(target=_write, args=(connection, self._outbox), name="outbox", daemon=True)
        self._compiling: dict[RequestId, None] = {}  # requests that are not added yet
        self._drain_until = float("inf")
        self._stats_due = 0.0
        self._trace = trace
        self._counters = LoopCounters(trace)
        self._pace = pace
        self._loop = EngineLoop(scheduler, executor, self._counters, pace)
        self._garbage = GarbageCollector()

    def drain(self, seconds: float) -> None:
        """Accepts nothing more, finishes what runs within `seconds`, then ends `run`. Safe in a signal handler."""
        self._inbox.put(Drain(seconds))

    def run(self, ready: Ready) -> None:
        """Serves until drained, then closes the executor and the pipe. Raises what broke, after clients were told."""
        with self._garbage:
            self._run(ready)

    def _run(self, ready: Ready) -> None:
        self._reader.start()
        self._writer.start()
        self._outbox.put(ready)
        self._send(Applied())  # sizes and what the disk holds, before the first request
        try:
            while not self._drained():
                while not self._inbox.empty():
                    self._take(self._inbox.get())
                self._refuse_expired()
                spare = self._pace.slack(time.monotonic())
                if self._garbage.due(spare):
                    with self._counters.wait:
                        self._garbage.collect_new()
                    continue
                if spare > 0:
                    self._wait_for_message(spare)
                    continue
                self._step()
        except BaseException as error:
            self._outbox.put(Fatal(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._outbox.put(None)
            self._writer.join(LAST_WORDS_S)  # whoever does not read them by then hangs
            self._executor.close()
            if self._trace is not None:
                self._trace.close()

    def _wait_for_message(self, seconds: float) -> None:
        """For so long at most; the device is busy meanwhile."""
        try:
            with self._counters.wait:
                message = self._inbox.get(timeout=seconds)
        except Empty:
            return
        self._take(message)

    def _refuse_expired(self) -> None:
        """Requests that have waited longer than `queue_timeout` are sent away."""
        for request in self._scheduler.expire(time.monotonic()):
            self._refuse(request, RequestError(503, "the server is busy: the request has waited too long in the queue"))

    def _refuse(self, request: RequestId, error: RequestError) -> None:
        self._outbox.put(StepMessage(refusals=(Refusal(request, error),)))

    def _step(self) -> None:
        """One pass of the loop; sends the result if it brings anything, and sleeps if there is nothing to do."""
        applied = self._loop.step()
        self._tell_erased()  # each plan looks through a part of a long log, even if no step follows
        if applied is None:
            if self._loop.idle:
                self._wait_for_news()
            return
        news = applied.requests or applied.events or applied.prompt_logprobs or applied.stuck
        if news or time.monotonic() >= self._stats_due:
            with self._counters.send:
                self._send(applied)

    def _wait_for_news(self) -> None:
        """Nothing to do: sleeps until a message comes, with one look at the books.

        While a reply waits to be confirmed (its client may be slow) others may wait too long behind it: no long sleep.
        """
        draining = self._drain_until - time.monotonic()
        try:
            self._take(self._inbox.get(timeout=max(0.0, min(draining, IDLE_CHECK_S))))
        except Empty:
            self._send(Applied())
            if draining == float("inf") and self._scheduler.idle:
                self._scheduler.check()
                if self._inbox.empty():
                    self._garbage.collect_idle()
                self._sleep()

    def _sleep(self) -> None:
        """Until a message comes, or until the scheduler wants to be asked though none does."""
        wake_at = self._scheduler.wake_at
        while (left := wake_at - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._take(self._inbox.get(timeout=min(left, LONGEST_WAIT_S)))
                return

    def _take(self, message: FromHTTP | Compiled) -> None:
        now = time.monotonic()
        match message:
            case Submit(request):
                self._submit(request, now)
            case Compiled(request, outcome):
                outcome.result()
                if request.id in self._compiling:  # else aborted meanwhile
                    del self._compiling[request.id]
                    self._add(request, now)
            case Abort(request):
                self._compiling.pop(request, None)
                self._scheduler.abort(request, now)
                self._send(Applied())
            case Finish(request, tokens):
                output = self._scheduler.finish(request, tokens, now)
                self._send(Applied(events=[output] if output else []))
            case Forget():
                forget(self._scheduler, message)
                self._tell_erased()
            case Fork() | Keep():
                change_conversation(self._scheduler, message, now)
            case Look(start):
                self._outbox.put(self._scheduler.conversations.residency(start, LOOKED_AT))
                self._send(Applied())
            case Drain(seconds):
                self._log_drain(seconds)
                self._drain_until = min(self._drain_until, now + seconds)
                self._outbox.put(Draining())

    def _submit(self, request: Request, now: float) -> None:
        """Compiling a grammar takes up to a second: it is done beside the loop, and the request waits for it."""
        grammar = request.sampling.grammar
        if self._drain_until < float("inf"):
            self._refuse(request.id, RequestError(503, "the server is shutting down"))
        elif grammar is None or (compiling := self._executor.begin_grammar(grammar)) is None:
            self._add(request, now)
        else:
            self._compiling[request.id] = None
            compiling.add_done_callback(lambda outcome: self._inbox.put(Compiled(request, outcome)))

    def _add(self, request: Request, now: float) -> None:
        try:
            self._scheduler.add(request, now)
        except RequestError as error:
            self._refuse(request.id, error)

    def _tell_erased(self) -> None:
        for wholly in self._scheduler.disk.take_erased():
            self._outbox.put(Erased(wholly))

    def _log_drain(self, seconds: float) -> None:
        replies = len(self._compiling) + len(self._scheduler.open_requests())
        waited = [f"{replies} running {'reply' if replies == 1 else 'replies'}"] if replies else []
        waited += ["KV on its way to the disk"] if self._scheduler.disk.saving else []
        if seconds and waited:
            what = " and ".join(waited)
            log.info("shutting down: waits for %s, at most %g s; the next signal ends it at once", what, seconds)
        else:
            log.info("shutting down")

    def _drained(self) -> bool:
        """Whether to end: nothing is left to do or to save, or its time is up; whoever is still open is told."""
        if self._drain_until == float("inf"):
            return False
        open_requests = [*self._compiling, *self._scheduler.open_requests()]
        if (open_requests or self._scheduler.disk.saving) and time.monotonic() < self._drain_until:
            return False
        for request in open_requests:
            self._scheduler.abort(request, time.monotonic())
        if open_requests:
            log.warning("shut down with %d requests unfinished", len(open_requests))
        if self._scheduler.disk.saving:
            log.warning("shut down before all KV was saved to disk")
        self._send(Applied(events=[Output(request, finish=FinishReason.ABORT) for request in open_requests]))
        return True

    def _send(self, applied: Applied) -> None:
        """One message to the HTTP process; statistics ride along when something began or ended, and every so often."""
        stats = copied = disk = loop = None
        if applied.events or not applied.requests or time.monotonic() >= self._stats_due:
            self._stats_due = time.monotonic() + STATS_INTERVAL_S
            stats, copied = self._scheduler.stats(), self._executor.copied_bytes
            disk = self._executor.disk_counters
            loop = self._counters.read(self._executor.transfer_seconds())
        stuck = tuple(Refusal(request, RequestError(500, STUCK)) for request in applied.stuck)
        events = tuple(applied.events)
        message = StepMessage(applied.requests, applied.tokens, events, stuck, stats, copied, disk, loop)
        if applied.logprobs or applied.prompt_logprobs:
            message = replace(message, logprobs=applied.logprobs, prompt_logprobs=applied.prompt_logprobs)
        self._outbox.put(message)


def change_conversation(scheduler: Scheduler, message: Fork | Keep, now: float) -> None:
    """The history store knows every conversation, the scheduler only those that were active since the start."""
    known = scheduler.conversations
    if message.conversation not in known:
        return
    match message:
        case Fork(conversation, new):
            if new not in known:
                known.fork(conversation, new, now)
        case Keep(conversation, ttl, pinned):
            known.keep(conversation, ttl, now + pinned, now)


def forget(scheduler: Scheduler, message: Forget) -> None:
    """Begins to erase the conversation's own KV; `scheduler.disk.take_erased` tells the end. A conversation that
    was not active since the start may have records on disk too."""
    conversation, tokens, shared, salt = message
    stored = scheduler.disk.keys(tokens, salt, shared)
    if conversation is None or conversation not in scheduler.conversations:
        scheduler.disk.erase(stored)
        return
    log = scheduler.conversations.tokens(conversation)
    # Of turns that ran at once another one may have ended last than in the history file.
    shared, others = min(shared, common_prefix(log, tokens)), stored if log != tokens else ()
    scheduler.conversations.delete(conversation, shared, others)


def _read(connection: Connection, inbox: SimpleQueue[FromHTTP]) -> None:
    """Thread: what the HTTP process says. When it is gone, so is every client: nothing is left to serve."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(Drain(0.0))


def _write(connection: Connection, outbox: SimpleQueue[ToHTTP | None]) -> None:
    """Thread: what the loop says, then the end of it.

    Closing the pipe would not do: while the reader waits in it, the other side sees no end.
    """
    try:
        while (message := outbox.get()) is not None:
            connection.send(message)
        with socket.socket(fileno=os.dup(connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # nobody listens any more: the reader says so to the loop
