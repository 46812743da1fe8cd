"""A connection of the HTTP process: uvicorn's, with an end to everybody's patience.

A client that sends its request drop by drop, or does not take its answer, costs a connection and perhaps a seat for as
long as it likes. Here it is cut off, and so are more connections than there may be.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEAD_BYTES = 32 * 1024  # a longer request line and headers: 400, unless one read brings all of them
LEAST_BYTES_PER_S = 10_000  # of a body, beyond the time that it has in any case
MOST_BEHIND_BYTES = 64 * 1024  # behind a request that is being answered; more wait where they are
OTHER_FILES = 128  # beside connections: the pipe, the history, libraries
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def allow_connections(most: int) -> int:
    """Asks the system for as many open files as that takes. Returns how many connections there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    wanted = most + OTHER_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(most, max(soft, allowed) - OTHER_FILES)


class PatientProtocol(H11Protocol):
    """At most `most` connections. A client has `patience` seconds

    * from the first byte, or the connection, to the end of a request's head,
    * for a body, and more for a long one at LEAST_BYTES_PER_S,
    * to take what is written to it, while that fills the buffers, and once the connection is to be closed.
    """

    def __init__(self, *args: Any, most: int, patience: float, **options: Any):
        super().__init__(*args, **options)
        self._most, self._patience = most, patience
        self._sending: asyncio.TimerHandle | None = None  # the client's turn to send
        self._taking: asyncio.TimerHandle | None = None  # the client's turn to take
        self._body_since: float | None = None
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.write(BUSY)
            self._close_soon()
        else:
            self._sending = self._later(self._patience, self._cut)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # behind the last request of the connection, whose answer its client still waits for
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._body_bytes += len(data)
        elif state is h11.IDLE and not self.transport.is_closing():
            if not self.conn.trailing_data[0]:  # the body of a request that was answered before: idle from here on
                self.timeout_keep_alive_task = self._later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            elif self._sending is None:
                self._sending = self._later(self._patience, self._cut)

    def handle_events(self) -> None:
        """Also, once a request is answered, of what came behind it."""
        super().handle_events()
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if self._body_since is None:
                self._stop_waiting()
                self._start_body()
        elif state is not h11.IDLE or self._body_since is not None or self.transport.is_closing():
            self._stop_waiting()
        if state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL) and len(self.conn.trailing_data[0]) < MOST_BEHIND_BYTES:  # type: ignore[attr-defined]
            self.flow.resume_reading()  # uvicorn stops where something is behind a request: nobody would see its end

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._taking is None:
            self._taking = self._later(self._patience, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = self._later(self._patience, self._cut) if self.transport.is_closing() else None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # after this answer, as its client or ours wished
            self._close_soon()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. If it came as a request's body nobody waits for that answer any more; a request that
        has been answered gets no second one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self._cut()
                return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self._close_soon()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._taking is not None:
            self._taking.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # behind an error uvicorn would keep all of this until then

    def _start_body(self) -> None:
        self._body_since, self._body_bytes = self.loop.time(), 0
        self._sending = self._later(self._patience, self._check_body)

    def _check_body(self) -> None:
        """Whether the body has come quickly enough. Time in which nobody reads it is not the client's."""
        assert self._body_since is not None
        if self.flow.read_paused or self.conn.they_are_waiting_for_100_continue:
            self._start_body()
            return
        left = self._body_since + self._patience + self._body_bytes / LEAST_BYTES_PER_S - self.loop.time()
        if left <= 0:
            self._cut()
        else:
            self._sending = self._later(left, self._check_body)

    def _stop_waiting(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._sending = self._body_since = None

    def _close_soon(self) -> None:
        """What is written may still be taken, but not for ever."""
        self.transport.close()
        if self._taking is None:
            self._taking = self._later(self._patience, self._cut)

    def _cut(self) -> None:
        self.transport.abort()

    def _later(self, seconds: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, what)
