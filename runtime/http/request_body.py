"""Reads the bodies of requests, and reports ignored fields to clients and to the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import Kind, parse
from ..frontend.body_base import MOST_NAMED, header_name

IGNORED = "pensieve.ignored"
HEADER = b"x-pensieve-ignored-fields"
MOST_LOGGED = 256  # names: limited because clients choose them

log = logging.getLogger(__name__)


async def read_body(kind: type[Kind], request: Request) -> Kind:
    """Returns the body as this kind of request. Raises RequestError (INVALID) as `parse`. Unknown
    fields are ignored only if `IgnoredFields` is active."""
    return await asyncio.to_thread(parse, kind, await request.body(), request.scope.get(IGNORED))


def say_ignored(request: Request, names: Iterable[str]) -> None:
    """Names more of the request that has no effect, as `tools.uniqueItems`. Raises RequestError
    (INVALID) if fields are not ignored."""
    plain = list(dict.fromkeys(header_name(name) for name in names))[:MOST_NAMED]
    ignored = request.scope.get(IGNORED)
    if ignored is not None:
        ignored += plain[: max(MOST_NAMED - len(ignored), 0)]
    elif plain:
        raise RequestError(ErrorKind.INVALID, f"this cannot be enforced: {', '.join(plain)}")


class IgnoredFields:
    """ASGI middleware: unknown fields, and parts of schemas that cannot be enforced, are ignored.
    The answer's header HEADER names them, and each name is logged once."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ignored: list[str] = []
        scope[IGNORED] = ignored

        async def with_names(message: Message) -> None:
            if ignored and message["type"] == "http.response.start":
                self._log(ignored)
                message["headers"] = [*message["headers"], (HEADER, ", ".join(ignored).encode())]
            await send(message)

        await self._app(scope, receive, with_names)

    def _log(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(name)
                log.warning("%s in requests is unknown or cannot be enforced: ignored", name)
