"""A connection of the HTTP process: uvicorn's, with time limits.

A client that sends its request very slowly, or does not read its answer, would occupy a connection
and perhaps a seat without end. Here it is cut off. Connections beyond the limit are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..system import allow_open_files

# a longer request line and headers: 400, unless one read contains all of them
MOST_HEAD_BYTES = 32 * 1024
LEAST_BYTES_PER_S = 10_000  # of a body, after the time that every body has
# of input after a request that is being answered; the rest stays in the socket
MOST_BEHIND_BYTES = 64 * 1024
OTHER_FILES = 128  # besides connections: the pipe, the history, libraries
WRITE = "pensieve.write"  # in the scope of a request: `write_piece`, if the client can read chunks
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: "
    b"close\r\n\r\n"
)


def allow_connections(most: int) -> int:
    """Asks the system for enough open files. Returns the allowed number of connections."""
    return min(most, allow_open_files(most + OTHER_FILES) - OTHER_FILES)


class PatientProtocol(H11Protocol):
    """At most `most` connections. A client has `patience` seconds

    * from the first byte, or the connection, to the end of a request's head,
    * for a body, and more for a long one at LEAST_BYTES_PER_S,
    * to read its answer while the answer fills the buffers, and after the connection has begun to
      close.
    """

    def __init__(
        self,
        *args: Any,
        most: int,
        patience: float,
        lost: Callable[[], object] = object,
        **options: Any,
    ):
        """`lost` is called at the connection's end."""
        super().__init__(*args, **options)
        self._most = most
        self._lost = lost
        self._patience = patience
        self._sending: asyncio.TimerHandle | None = None  # the client's time to send
        self._taking: asyncio.TimerHandle | None = None  # the client's time to read
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
            return  # after the last request of the connection, whose answer is not sent yet
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._body_bytes += len(data)
        elif state is h11.IDLE and not self.transport.is_closing():
            # the body of an answered request; the connection is idle from here on
            if not self.conn.trailing_data[0]:
                self.timeout_keep_alive_task = self._later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            elif self._sending is None:
                self._sending = self._later(self._patience, self._cut)

    def write_piece(self, piece: bytes) -> bool:
        """Sends a piece of an answer as a chunk, as ASGI's `send` does, but without the layers
        around it, which cost as much as the text itself. Returns False, and sends nothing, if
        `send` would wait for the client. The answer must have no length, and HTTP/1.1."""
        unread = self.flow.write_paused or self.cycle.disconnected
        if unread or self.conn.our_state is not h11.SEND_BODY:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def _forget_write(self) -> None:
        """A scope that holds a method of its protocol would keep both until the garbage collector
        runs."""
        if self.scope is not None:
            self.scope.pop(WRITE, None)  # type: ignore[misc]

    def handle_events(self) -> None:
        """Also handles the input after an answered request."""
        super().handle_events()
        if self.scope is not None and self.scope["http_version"] == "1.1":
            self.scope[WRITE] = self.write_piece  # type: ignore[literal-required]
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if self._body_since is None:
                self._stop_waiting()
                self._start_body()
        elif state is not h11.IDLE or self._body_since is not None or self.transport.is_closing():
            self._stop_waiting()
        answered = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]
        if state in answered and len(self.conn.trailing_data[0]) < MOST_BEHIND_BYTES:
            # uvicorn stops reading while a further request is buffered; the connection's end would
            # not be seen
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._taking is None:
            self._taking = self._later(self._patience, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = (
                self._later(self._patience, self._cut) if self.transport.is_closing() else None
            )

    def on_response_complete(self) -> None:
        self._forget_write()
        super().on_response_complete()
        # after this answer, as requested by the client or the server
        if self.transport.is_closing():
            self._close_soon()

    def send_400_response(self, msg: str) -> None:
        """The input is not HTTP. If it came as a request's body, the client no longer waits for
        that answer. An answered request gets no second answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self._cut()
                return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:  # an answer to HEAD has no text; its head is sent
                self.transport.close()
        self._close_soon()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._close_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._taking is not None:
            self._taking.cancel()
        super().connection_lost(exc)
        self._lost()
        self._forget_write()
        # after an error uvicorn would keep all of this until then
        self._unset_keepalive_if_required()

    def _start_body(self) -> None:
        self._body_since = self.loop.time()
        self._body_bytes = 0
        self._sending = self._later(self._patience, self._check_body)

    def _check_body(self) -> None:
        """Checks that the body has come fast enough. Time in which the application does not read is
        not counted."""
        assert self._body_since is not None
        if self.flow.read_paused or self.conn.they_are_waiting_for_100_continue:
            self._start_body()
            return
        left = (
            self._body_since
            + self._patience
            + self._body_bytes / LEAST_BYTES_PER_S
            - self.loop.time()
        )
        if left <= 0:
            self._cut()
        else:
            self._sending = self._later(left, self._check_body)

    def _stop_waiting(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._sending = self._body_since = None

    def _close_soon(self) -> None:
        """Lets the client read the written data, for a limited time."""
        self.transport.close()
        if self._taking is None:
            self._taking = self._later(self._patience, self._cut)

    def _cut(self) -> None:
        self.transport.abort()

    def _later(self, seconds: float, what: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, what)
