"""Sends the events of a streamed answer as fast as the client reads them, and keeps the others."""

from __future__ import annotations

import asyncio

from starlette.types import Send

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
PIECE_BYTES = 64 * 1024
"""The longest piece that is sent at once. A client has `--client-timeout` for each piece, not for
all that is kept."""


class EventSender:
    """Made with the answer's first events. The code that makes it closes it in any case.

    A reply never waits for its client: `put` keeps what the client has not read.
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]):
        self._send = send
        self._headers = [*EVENT_HEADERS, *headers]
        self._unread = bytearray()
        self._ended = False
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def unread_bytes(self) -> int:
        """Bytes that are kept, besides a piece that is being sent."""
        return len(self._unread)

    def put(self, events: str) -> None:
        """Raises the error of an earlier piece that could not be sent."""
        if self._task.done():
            self._task.result()
        self._unread += events.encode()
        self._news.set()

    async def end(self) -> None:
        """Returns when all events are sent, or the client is gone."""
        self._ended = True
        self._news.set()
        await self._task

    def close(self) -> None:
        """Sends no more. Idempotent."""
        self._task.cancel()

    async def _run(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        more = True
        while more:
            while not self._unread and not self._ended:
                self._news.clear()
                await self._news.wait()
            piece = bytes(self._unread[:PIECE_BYTES])
            del self._unread[:PIECE_BYTES]
            more = not self._ended or bool(self._unread)
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
