"""What one client may ask of the HTTP process: so many requests at a time, bodies so long. Both are ASGI middleware."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..scheduler.types import RequestError
from .api_errors import error_response
from .api_keys import OWNER


class ClientLimit:
    """At most `most` requests of one client are open; one more is refused with 429.

    A client is the owner of an API key where keys are needed (`KeyCheck` comes first), else an address. Only what makes
    the engine work counts.
    """

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most = app, most
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = scope.get(OWNER) or (scope["client"][0] if scope["client"] else "")
        if self._open[client] >= self._most:
            error = RequestError(429, f"this client has {self._most} open requests already, the most it may have")
            await error_response(error)(scope, receive, send)
            return
        self._open[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


class BodyLimit:
    """A body of more than `most` bytes is refused with 413, as soon as that is known."""

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self._most:
            await error_response(self._error())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise self._error()  # in whoever reads the body: the application answers it as it does all refusals
            return message

        await self._app(scope, counted, send)

    def _error(self) -> RequestError:
        return RequestError(413, f"the body is longer than the {self._most} bytes allowed here")
