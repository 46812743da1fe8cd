"""API keys and their owners."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.errors import error_response

OWNER = "pensieve.owner"


def owner_of(request: Request) -> str:
    """The owner of the data that the request creates and may see; "" if no keys are needed."""
    return str(request.scope.get(OWNER, ""))


class KeyCheck:
    """ASGI middleware: every path except `open_paths` needs one of the keys, as `Authorization:
    Bearer KEY` or as `X-API-Key: KEY`.

    The time of a comparison depends neither on the given key nor on the matching one.
    """

    def __init__(self, app: ASGIApp, digests: Sequence[str], open_paths: frozenset[str]):
        self._app = app
        self._digests = tuple(digests)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            owner = self._owner(dict(scope["headers"]))
            if owner is None:
                error = RequestError(
                    ErrorKind.UNAUTHENTICATED,
                    "this server needs a valid API key, as Authorization: Bearer KEY or X-API-Key: "
                    "KEY",
                )
                response = error_response(error, scope["path"])
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope[OWNER] = owner
        await self._app(scope, receive, send)

    def _owner(self, headers: dict[bytes, bytes]) -> str | None:
        """The owner of the first key that is valid."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = (bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
        owners = [self._owner_of(key.strip()) for key in keys if key]
        return next((owner for owner in owners if owner is not None), None)

    def _owner_of(self, key: bytes) -> str | None:
        given = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if any(matches) else None
