"""The events of a streamed answer: those of one reply that wait become one event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import Send

from ...scheduler.types import RequestError, RowResult
from ..frontend.reply import CompletionWriter, Piece, Reply
from .event_sender import EventSender, Write, write_nothing

MOST_STEPS = 2
"""Steps whose tokens an event may have while the client reads."""
MOST_UNREAD_STEPS = 32
"""The same while the client does not read. A limit, because only written events count as unread."""


class _Waiting(NamedTuple):
    """Pieces of one reply that are not written yet, as one. `finish`: the reply's reason, with its
    last piece."""

    piece: Piece
    finish: str | None
    steps: int


class ReplyEvents:
    """Writes the events of a call's replies. The code that makes it closes it in any case."""

    def __init__(
        self,
        writer: CompletionWriter,
        replies: Mapping[int, Reply],
        send: Send,
        headers: list[tuple[bytes, bytes]],
        write: Write = write_nothing,
    ):
        self._writer = writer
        self._replies = replies
        self._numbers = {request: number for number, request in enumerate(replies)}
        self._waiting: dict[int, _Waiting] = {}  # by the reply's number
        self._written = [writer.opening(list(replies.values()))]
        self._sender = EventSender(send, headers, write, self._waiting_events)
        self.unfinished = len(replies)

    @property
    def unread_bytes(self) -> int:
        """Bytes of events that the client has not read."""
        return self._sender.unread_bytes

    def add(self, result: RowResult) -> None:
        """Takes a result of one of the replies. The ends of the last ones are sent by `put_end`.
        Raises as `Reply.add`."""
        reply = self._replies[result.request]
        piece = reply.add(result)
        self.unfinished -= result.finish is not None
        self._add(self._numbers[result.request], piece, reply.reason)
        if not self.unfinished:
            self._write_waiting()  # the turn is stored as it is written

    def send(self) -> None:
        """Sends what has been added. For a client that does not read, it waits."""
        if not self._sender.waits:
            self._write_waiting()
        self._put()

    def put_end(self, error: RequestError | None = None) -> None:
        """Adds the end of the answer, or of an answer that has failed. No more can be added."""
        self._write_waiting()
        writer = self._writer
        self._written.append(
            writer.closing(list(self._replies.values())) if error is None else writer.failure(error)
        )
        self._put()

    async def end(self) -> None:
        """Returns when all events are sent, or the client is gone."""
        await self._sender.end()

    def close(self) -> None:
        """Sends no more. Idempotent."""
        self._sender.close()

    def _add(self, number: int, piece: Piece, finish: str | None) -> None:
        waiting = self._waiting.get(number)
        if waiting is None:
            self._waiting[number] = _Waiting(piece, finish, 1)
            return
        most = MOST_UNREAD_STEPS if self._sender.waits else MOST_STEPS
        joined = waiting.piece.joined(piece) if waiting.steps < most else None
        if joined is None:
            self._write(number, waiting)
            self._waiting[number] = _Waiting(piece, finish, 1)
        else:
            self._waiting[number] = _Waiting(joined, finish, waiting.steps + 1)

    def _write(self, number: int, waiting: _Waiting) -> None:
        self._written.append(self._writer.piece(number, waiting.piece, waiting.finish))

    def _write_waiting(self) -> None:
        for number, waiting in self._waiting.items():
            self._write(number, waiting)
        self._waiting.clear()

    def _put(self) -> None:
        self._sender.put(self._written_events())

    def _waiting_events(self) -> str:
        """For a client that reads again. The ends wait until the turn is committed."""
        if not self.unfinished:
            return ""
        self._write_waiting()
        return self._written_events()

    def _written_events(self) -> str:
        """Hands out what is written."""
        events = "".join(self._written)
        self._written.clear()
        return events
