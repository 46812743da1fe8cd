"""The socket between the HTTP process and one of its workers: messages arrive in order, and either
side may call functions of the other one.

A function is named by a method with its name and signature. The processes trust each other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from ....scheduler.types import ErrorKind, RequestError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Any, Arguments], Result]

SIZE_BYTES = 4  # in front of each message
ENDED = "a process of this server has ended; try again"
MISTAKE = "the server has failed to answer; its log says why"

log = logging.getLogger(__name__)


class CallMessage(NamedTuple):
    """`number`: of the call, None: it is not answered."""

    number: int | None
    name: str
    args: tuple[Any, ...]


class AnswerMessage(NamedTuple):
    number: int
    value: Any
    error: RequestError | None


class CancelMessage(NamedTuple):
    """The answer to this call is no longer needed."""

    number: int


class Channel(asyncio.Protocol):
    """One end. `closed` has a result when the other end is gone. Calls from there run in the order
    of their arrival, up to their first wait."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # own calls
        self._running: dict[int, asyncio.Future[Any]] = {}  # of the other end
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None

    def offer(self, *functions: Callable[..., Any]) -> None:
        """The other end may call these from now on. They return awaitables where it waits for an
        answer (`ask`)."""
        self._functions |= {function.__name__: function for function in functions}

    def tell(
        self, method: Method[Arguments, None], *args: Arguments.args, **_: Arguments.kwargs
    ) -> None:
        """Calls the function of this name at the other end, which does not answer."""
        self._send(CallMessage(None, method.__name__, args))

    async def ask(
        self,
        method: Method[Arguments, Awaitable[Result]],
        *args: Arguments.args,
        **_: Arguments.kwargs,
    ) -> Result:
        """Calls the function of this name at the other end, and returns its result. Cancels it
        there if this call is cancelled; what it has opened before stays open.

        Raises the function's RequestError, and UNAVAILABLE if the other end is gone.
        """
        if self.closed.done():
            raise RequestError(ErrorKind.UNAVAILABLE, ENDED)
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(CallMessage(number, method.__name__, args))
        try:
            return cast(Result, await answer)
        except asyncio.CancelledError:
            self._send(CancelMessage(number))
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """What was sent before arrives. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (message := self._next_message()) is not None:
            self._receive(pickle.loads(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RequestError(ErrorKind.UNAVAILABLE, ENDED))

    # -- internal

    def _send(self, message: CallMessage | AnswerMessage | CancelMessage) -> None:
        if self._transport is not None and not self._transport.is_closing():
            pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(pickled).to_bytes(SIZE_BYTES, "big") + pickled)

    def _next_message(self) -> bytes | None:
        end = SIZE_BYTES + int.from_bytes(self._unread[:SIZE_BYTES], "big")
        if len(self._unread) < max(end, SIZE_BYTES + 1):
            return None
        message = bytes(self._unread[SIZE_BYTES:end])
        del self._unread[:end]
        return message

    def _receive(self, message: CallMessage | AnswerMessage | CancelMessage) -> None:
        match message:
            case CallMessage(None, name, args):
                # as the first step of a call that is answered; its error is logged
                asyncio.get_running_loop().call_soon(self._functions[name], *args)
            case CallMessage(int(number), name, args):
                running = asyncio.ensure_future(self._functions[name](*args))
                self._running[number] = running
                running.add_done_callback(partial(self._answer, name, number))
            case CancelMessage(number):
                if number in self._running:
                    self._running[number].cancel()
            case AnswerMessage(number, value, error):
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    return
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(error)

    def _answer(self, name: str, number: int, running: asyncio.Future[Any]) -> None:
        del self._running[number]
        if running.cancelled():
            return
        error = running.exception()
        if error is None:
            self._send(AnswerMessage(number, running.result(), None))
        elif isinstance(error, RequestError):
            self._send(AnswerMessage(number, None, error))
        else:
            log.critical("%s has failed", name, exc_info=error)
            failed = RequestError(ErrorKind.INTERNAL, MISTAKE)
            self._send(AnswerMessage(number, None, failed))
