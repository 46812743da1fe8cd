"""ASGI: passes each request on to a server of this host, and its answer back, piece by piece as
they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

OF_ONE_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"date",
}
SENT_BY_DEFAULT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
REPLICA = b"x-pensieve-replica"


class Relay:
    """`open_requests` counts requests whose answers are not complete. A header of each answer names
    the replica."""

    def __init__(self, url: str, replica: str):
        self.open_requests = 0
        self._url = url
        self._replica = replica.encode()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SENT_BY_DEFAULT,
            auto_decompress=False,
        )

    async def get(self, path: str) -> tuple[int, str]:
        """The status and text of an answer of the server itself."""
        async with self._session.get(f"{self._url}{path}") as answer:
            return answer.status, await answer.text()

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.open_requests += 1
        try:
            await self._pass_on(scope, receive, send)
        finally:
            self.open_requests -= 1

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        path = path.removeprefix(scope.get("root_path", "").rstrip("/").encode())
        query = scope["query_string"]
        url = URL(
            self._url + path.decode("latin-1") + ("?" + query.decode("latin-1") if query else ""),
            encoded=True,
        )
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in OF_ONE_CONNECTION
        )
        if scope.get("client"):  # limits for each client need its address
            headers["X-Forwarded-For"] = ", ".join(
                [*headers.popall("X-Forwarded-For", []), scope["client"][0]]
            )
        has_body = "content-length" in headers or any(
            name == b"transfer-encoding" for name, _ in scope["headers"]
        )
        body = _pieces(receive) if has_body else None
        try:
            answer = await self._session.request(
                scope["method"], url, headers=headers, data=body, allow_redirects=False
            )
        except (aiohttp.ClientConnectionError, ConnectionError):
            message = "the server of this replica has ended; another replica answers a new attempt"
            error = {"message": message, "type": "server_error", "param": None, "code": None}
            headers_of_error = {"retry-after": "1", REPLICA.decode(): self._replica.decode()}
            await JSONResponse({"error": error}, 503, headers_of_error)(scope, receive, send)
            return
        async with answer:
            kept = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower() not in OF_ONE_CONNECTION
            ]
            start = {"status": answer.status, "headers": [*kept, (REPLICA, self._replica)]}
            await send({"type": "http.response.start", **start})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message: dict[str, Any] = dict(await receive())
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        yield message.get("body", b"")
        if not message.get("more_body"):
            return
