"""The engine loop behind a pipe: receives requests, runs steps, sends the results.

    receive  ->  EngineSession.step  ->  send

The next step is planned shortly before the device needs it (`StepTiming`); until then requests are
received.

Two threads move messages between the HTTP process's pipe and two queues, so the loop never waits
for a client. The loop ends when it is drained, when the HTTP process is gone, or with the exception
of a broken invariant, which is sent to every client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from ..scheduler.scheduler import Scheduler
from ..scheduler.step_timing import StepTiming
from ..scheduler.types import Applied, ErrorKind, FinishReason, Request, RequestError, RowResult
from ..scheduler.work import MESSAGE
from .engine_session import EngineSession, no_report
from .executor import Executor
from .gc_control import GarbageCollector
from .inbox import Inbox
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
    StepMessage,
    Submit,
    ToHTTP,
)
from .observe.chrome_trace import TraceFile
from .observe.loop_stats import LoopCounters

if TYPE_CHECKING:
    from .kv_events.publisher import KVEventPublisher

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
MOST_LOOKED_AT = 8192  # chunks in the answer to one `Look`
SHARE_S = 2e-3  # a share of the work that is done in pieces takes less on any machine that serves
LONGEST_WAIT_S = 1.0  # a signal that arrives just before a wait is handled when the wait ends
LAST_WORDS_S = 15.0  # seconds for the HTTP process to read the last messages at the end
IDLE_CHECK_S = 1.0  # the state is checked once after so many seconds without work
# slots of all tiers up to which it is checked: about 50 ms, for which the next request waits
MOST_CHECKED = 16_384


class GrammarCompiled(NamedTuple):
    """A grammar is compiled, and the session can add its request. Sent by the compiler's thread to
    the loop."""


class Service:
    """Serves requests. `connection` is the HTTP process's pipe; from here on the scheduler, the
    executor, the trace and the publisher belong to this loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connection: Connection,
        timing: StepTiming,
        trace: TraceFile | None = None,
        kv_events: KVEventPublisher | None = None,
    ):
        self._scheduler = scheduler
        self._executor = executor
        self._inbox: Inbox[FromHTTP | GrammarCompiled] = Inbox()
        self._outbox: SimpleQueue[ToHTTP | None] = SimpleQueue()
        self._reader = threading.Thread(
            target=_read, args=(connection, self._inbox), name="inbox", daemon=True
        )
        self._writer = threading.Thread(
            target=_write, args=(connection, self._outbox), name="outbox", daemon=True
        )
        self._drain_until = float("inf")
        self._stats_due = 0.0
        self._changed = False  # a message has changed the statistics since they were sent
        self._trace = trace
        self._kv_events = kv_events
        self._counters = LoopCounters(trace)
        self._timing = timing
        self._session = EngineSession(
            scheduler,
            executor,
            self._counters,
            timing,
            in_pieces=True,
            wake=lambda: self._inbox.put(GrammarCompiled()),
            report_kv=no_report if kv_events is None else kv_events.report,
        )
        self._garbage = GarbageCollector()

    def drain(self, seconds: float) -> None:
        """Refuses new requests, finishes running ones within `seconds`, then ends `run`. Safe in a
        signal handler."""
        self._inbox.put(Drain(seconds))

    def run(self, ready: Ready) -> None:
        """Serves until drained, then closes the executor and the pipe. Raises the error that broke
        the loop, after clients were told."""
        with self._garbage:
            self._run(ready)

    def _run(self, ready: Ready) -> None:
        self._reader.start()
        self._writer.start()
        self._outbox.put(ready)
        self._send(Applied())  # sizes and the disk's contents, before the first request
        try:
            while not self._drained():
                self._take_messages()
                self._send_between_steps()
                slack = self._timing.slack(time.monotonic())
                if self._garbage.due(slack):
                    with self._counters.wait:
                        self._garbage.collect_new()
                    continue
                if slack > 0 and not self._has_work():
                    self._wait_for_message(slack)
                    continue
                if slack > SHARE_S:
                    self._scheduler.go_on(time.monotonic())
                    continue
                self._step()
        except BaseException as error:
            self._outbox.put(Fatal(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._outbox.put(None)
            self._writer.join(LAST_WORDS_S)  # an HTTP process that has not read them by then hangs
            self._executor.close()
            if self._kv_events is not None:
                self._kv_events.close()
            if self._trace is not None:
                self._trace.close()

    def _take_messages(self) -> None:
        """Takes messages as long as the scheduler's budget of work lasts. The others are taken
        after the next step."""
        while self._scheduler.work.left > 0 and not self._inbox.empty():
            self._take(self._inbox.get())
        if self._changed:
            self._send(Applied())

    def _has_work(self) -> bool:
        """True if work is left, or the budget of work is used up."""
        return self._scheduler.work.left <= 0 or self._scheduler.has_work(time.monotonic())

    def _wait_for_message(self, seconds: float) -> None:
        """Waits for a message for at most `seconds`, while the device is busy."""
        try:
            with self._counters.wait:
                message = self._inbox.get(timeout=seconds)
        except Empty:
            return
        self._take(message)

    def _send_between_steps(self) -> None:
        """Sends the results that no step has brought, such as refusals."""
        results = self._session.take_results()
        if results:
            self._outbox.put(StepMessage(Applied(rows=tuple(results))))

    def _step(self) -> None:
        """Makes one pass of the loop. Sends the result if there is one, and sleeps if there is
        nothing to do."""
        self._grow()
        applied = self._session.step()
        if applied is None:
            if self._session.idle:
                self._wait_for_news()
            return
        if applied.requests or applied.rows or time.monotonic() >= self._stats_due:
            with self._counters.send:
                self._send(applied)

    def _wait_for_news(self) -> None:
        """Sleeps until a message arrives, because there is nothing to do. Checks the state once.

        It does not sleep long while a reply waits for its confirmation (the HTTP process may be
        busy): requests behind it may reach their time-out.
        """
        draining = self._drain_until - time.monotonic()
        try:
            self._take(self._inbox.get(timeout=max(0.0, min(draining, IDLE_CHECK_S))))
        except Empty:
            self._send(Applied())
            if draining == float("inf") and self._scheduler.idle:
                config = self._scheduler.config
                if (
                    config.gpu_kv_chunks + config.most_host_kv_chunks + config.disk_kv_chunks
                    <= MOST_CHECKED
                ):
                    self._scheduler.check()
                if self._inbox.empty():
                    self._garbage.collect_idle()
                self._sleep()

    def _sleep(self) -> None:
        """Sleeps until a message arrives or the scheduler's next time."""
        wake_at = self._scheduler.wake_at
        while (left := wake_at - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                self._take(self._inbox.get(timeout=min(left, LONGEST_WAIT_S)))
                return
            if self._grow():
                self._send(Applied())

    def _grow(self) -> bool:
        """Tells the scheduler of slots that HOST has gained. Returns whether there are any."""
        return self._scheduler.config.host_kv_growth > 0 and self._scheduler.grow_host(
            self._executor.host_slots
        )

    def _take(self, message: FromHTTP | GrammarCompiled) -> None:
        self._scheduler.work.spend(MESSAGE)
        match message:
            case Submit(request):
                self._submit(request)
            case GrammarCompiled():
                pass  # its request is added below
            case Abort(request):
                self._session.abort(request)
                self._changed = True
            case Finish(request, tokens):
                self._session.finish(request, tokens)
                self._changed = True
            case Forget():
                self._session.forget(message, lambda erasure: self._outbox.put(Erased(erasure)))
            case Fork() | Keep():
                self._session.change(message)
            case Look(start):
                self._outbox.put(self._scheduler.conversations.residency(start, MOST_LOOKED_AT))
                self._changed = True
            case Drain(seconds):
                if seconds:
                    self._scheduler.stop(time.monotonic())
                self._log_drain(seconds)
                self._drain_until = min(self._drain_until, time.monotonic() + seconds)
                self._outbox.put(Draining())
        self._send_between_steps()

    def _submit(self, request: Request) -> None:
        if self._drain_until < float("inf"):
            refused = RowResult(
                request.id, error=RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down")
            )
            self._outbox.put(StepMessage(Applied(rows=(refused,))))
        else:
            self._session.add(request)

    def _log_drain(self, seconds: float) -> None:
        replies = len(self._session.open_requests())
        waited = [f"{replies} running {'reply' if replies == 1 else 'replies'}"] if replies else []
        waited += ["KV on its way to lower tiers"] if self._scheduler.lower.unfinished else []
        if seconds and waited:
            what = " and ".join(waited)
            log.info(
                "shutting down: waits for %s, at most %g s; the next signal ends it at once",
                what,
                seconds,
            )
        else:
            log.info("shutting down")

    def _drained(self) -> bool:
        """True if the loop should end: there is no work left, or its time is up. Requests that are
        still open are refused."""
        if self._drain_until == float("inf"):
            return False
        open_requests = self._session.open_requests()
        unfinished = open_requests or self._scheduler.lower.unfinished
        if unfinished and time.monotonic() < self._drain_until:
            return False
        for request in open_requests:
            self._session.abort(request)
        if open_requests:
            log.warning("shut down with %d requests unfinished", len(open_requests))
        if self._scheduler.lower.unfinished:
            log.warning("shut down before all KV was spilled to lower tiers")
        aborted = tuple(RowResult(request, finish=FinishReason.ABORT) for request in open_requests)
        self._send(Applied(rows=aborted))
        return True

    def _send(self, applied: Applied) -> None:
        """Sends one message to the HTTP process. It includes statistics when a request began or
        ended, and at regular intervals."""
        stats = copied = disk = shared = loop = kv_events = None
        begun_or_ended = any(row.usage or row.finish or row.error for row in applied.rows)
        nothing_new = not applied.requests and not applied.rows
        if begun_or_ended or nothing_new or time.monotonic() >= self._stats_due:
            self._stats_due = time.monotonic() + STATS_INTERVAL_S
            self._changed = False
            stats = self._scheduler.stats()
            copied = self._executor.copied_bytes
            disk = self._executor.disk_counters
            shared = self._executor.shared_counters
            loop = self._counters.read(self._executor.transfer_seconds())
            kv_events = None if self._kv_events is None else self._kv_events.counters()
        self._outbox.put(StepMessage(applied, stats, copied, disk, shared, loop, kv_events))


def _read(connection: Connection, inbox: Inbox[FromHTTP | GrammarCompiled]) -> None:
    """Thread: passes on the HTTP process's messages. If that process ends, no client is left, and
    the loop drains."""
    try:
        while True:
            received = connection.recv()
            for message in received if isinstance(received, list) else (received,):
                inbox.put(message)
    except (EOFError, OSError):
        inbox.put(Drain(0.0))


def _write(connection: Connection, outbox: SimpleQueue[ToHTTP | None]) -> None:
    """Thread: sends the loop's messages, then signals their end.

    Closing the pipe would not signal it: while the reader waits in the pipe, the other side sees no
    end.
    """
    try:
        while (message := outbox.get()) is not None:
            connection.send(message)
        with socket.socket(fileno=os.dup(connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the HTTP process is gone; the reader reports that to the loop
