"""API keys, and the owner that each of them stands for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...scheduler.types import RequestError
from ..frontend.errors import error_response

OWNER = "pensieve.owner"


def key_digest(key: str) -> str:
    """What the server keeps of a key. It is the name of the key's owner, too."""
    return hashlib.sha256(key.encode()).hexdigest()


def owner_of(request: Request) -> str:
    """The owner of what the request makes and may see; "" where no keys are needed."""
    return str(request.scope.get(OWNER, ""))


class KeyCheck:
    """ASGI middleware: every path but `open_paths` needs one of the keys, as `Authorization: Bearer KEY`.

    The time that a comparison takes depends neither on the key given nor on which one matches.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[str], open_paths: frozenset[str]):
        self._app, self._digests, self._open_paths = app, tuple(digests), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            owner = self._owner(dict(scope["headers"]).get(b"authorization", b""))
            if owner is None:
                error = RequestError(401, "this server needs a valid API key: send Authorization: Bearer KEY")
                response = error_response(error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope[OWNER] = owner
        await self._app(scope, receive, send)

    def _owner(self, authorization: bytes) -> str | None:
        scheme, _, key = authorization.partition(b" ")
        given = hashlib.sha256(key.strip()).hexdigest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if scheme.lower() == b"bearer" and any(matches) else None
