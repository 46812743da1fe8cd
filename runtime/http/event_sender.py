"""Sends the events of a streamed answer as fast as the client reads them, and keeps the others."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Send

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
PIECE_BYTES = 64 * 1024
"""The longest piece that is sent at once. A client has `--client-timeout` for each piece, not for
all that is kept."""


class EventSender:
    """Made with the answer's first events. The code that makes it closes it in any case.

    A reply never waits for its client: `put` keeps what the client has not read. While the client
    reads, `put` sends at once; a task runs only while the client does not read.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        more: Callable[[], str] = lambda: "",
    ):
        """`more`: further events, for a client that has read all that was kept."""
        self._send = send
        self._more = more
        self._unread = bytearray()
        self._task: asyncio.Task[None] | None = None
        headers = [*EVENT_HEADERS, *headers]
        self._begin({"type": "http.response.start", "status": 200, "headers": headers})

    @property
    def waits(self) -> bool:
        """True while the client does not read."""
        return self._task is not None

    @property
    def unread_bytes(self) -> int:
        """Bytes that are kept, besides a piece that is being sent."""
        return len(self._unread)

    def put(self, events: str) -> None:
        """Raises the error of this or an earlier piece that could not be sent."""
        if self._task is not None and self._task.done():
            self._task.result()
        self._unread += events.encode()
        while self._unread and self._task is None:
            self._begin(self._next_piece())

    async def end(self) -> None:
        """Returns when all events are sent, or the client is gone."""
        if self._task is not None:
            await self._task
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Sends no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def _next_piece(self) -> Message:
        piece = bytes(self._unread[:PIECE_BYTES])
        del self._unread[:PIECE_BYTES]
        return {"type": "http.response.body", "body": piece, "more_body": True}

    def _begin(self, message: Message) -> None:
        """Sends the message without a task, if the client reads."""
        sending: Coroutine[Any, Any, None] = self._send(message)  # type: ignore[assignment]
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._task = asyncio.create_task(self._go_on(sending, awaited))

    async def _go_on(self, sending: Coroutine[Any, Any, None], awaited: object) -> None:
        """Ends a send that waits for the client, then sends what has come meanwhile."""
        await _resumed(sending, awaited)
        while True:
            if not self._unread:
                self._unread += self._more().encode()
            if not self._unread:
                break
            await self._send(self._next_piece())
        self._task = None


@types.coroutine
def _resumed(sending: Coroutine[Any, Any, None], awaited: object) -> Generator[Any, Any, None]:
    """Awaits the rest of a coroutine that has begun outside of a task and waits for `awaited`."""
    try:
        while True:
            try:
                answer = yield awaited
            except BaseException as error:  # the task's cancellation
                awaited = sending.throw(error)
            else:
                awaited = sending.send(answer)
    except StopIteration:
        pass
