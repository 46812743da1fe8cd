"""Sends the events of a streamed answer as fast as the client reads them, and keeps the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Send

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
PIECE_BYTES = 64 * 1024
"""The longest piece that is sent at once. A client has `--client-timeout` for each piece, not for
all that is kept."""

Write = Callable[[bytes], bool]
"""Sends a piece of the body at once; returns False, and sends nothing, where that cannot be done
without waiting (`PatientProtocol.write_piece`)."""


def write_nothing(piece: bytes) -> bool:
    """The `Write` of a server that has none."""
    return False


class EventSender:
    """Made with the answer's first events. The code that makes it closes it in any case.

    A reply never waits for its client: `put` keeps what the client has not read. While the client
    reads, `put` writes at once; a task sends only what waits for the client.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        write: Write = write_nothing,
        more: Callable[[], str] = str,
    ):
        """`more`: returns the next events for a client that has read all that was kept."""
        self._send = send
        self._write = write
        self._more = more
        self._unread = bytearray()  # empty without a task
        self._task: asyncio.Task[None] | None = asyncio.create_task(
            self._start([*EVENT_HEADERS, *headers])
        )

    @property
    def waits(self) -> bool:
        """True while the client does not read."""
        return self._task is not None

    @property
    def unread_bytes(self) -> int:
        """Bytes that are kept, besides a piece that is being sent."""
        return len(self._unread)

    def put(self, events: str) -> None:
        """Raises the error of an earlier piece that could not be sent."""
        if self._task is not None and self._task.done():
            self._task.result()
        if not events:  # a chunk without bytes would end the answer
            return
        piece = events.encode()
        if self._task is None and len(piece) <= PIECE_BYTES and self._write(piece):
            return
        self._unread += piece
        if self._task is None:
            self._task = asyncio.create_task(self._send_unread())

    async def end(self) -> None:
        """Returns when all events are sent, or the client is gone."""
        if self._task is not None:
            await self._task
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Sends no more. Idempotent."""
        self._more = str  # which may hold this sender: without the cycle both are freed at once
        if self._task is not None:
            self._task.cancel()

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_unread()

    async def _send_unread(self) -> None:
        while True:
            if not self._unread:
                self._unread += self._more().encode()
            if not self._unread:
                break
            await self._send(self._next_piece())
        self._task = None

    def _next_piece(self) -> Message:
        piece = bytes(self._unread[:PIECE_BYTES])
        del self._unread[:PIECE_BYTES]
        return {"type": "http.response.body", "body": piece, "more_body": True}
