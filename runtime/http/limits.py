"""ASGI middleware around every request: the limits of one client, the size of a body, the security
headers, and a count of refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.calls import Caller, claim_any
from ..frontend.errors import error_response
from .auth import OWNER, owner_of

CLAIM = "pensieve.claim"
SESSIONS = ("session-id", "x-session-id", "x-claude-code-session-id", "x-dynamo-session-id")
AFFINITY = "x-session-affinity"
LONGEST_SESSION = 1000  # the same as for a conversation's id
COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-gzip", "zstd"})
"""In `Content-Encoding`, where some clients write the character set instead."""
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


def caller_of(request: Request) -> Caller:
    """Raises RequestError (400) if the name of its session is too long."""
    return Caller(
        owner_of(request),
        client_of(request.scope),
        request.scope.get(CLAIM, claim_any),
        _named(request, SESSIONS),
        _named(request, (AFFINITY,)),
    )


def _named(request: Request, headers: Sequence[str]) -> str | None:
    """The value of the first of these headers that has one. Its bytes are UTF-8, as in a path."""
    for header in headers:
        if value := request.headers.get(header):
            name = value.encode("latin-1").decode("utf-8", "backslashreplace")
            if len(name) > LONGEST_SESSION:
                raise RequestError(
                    ErrorKind.INVALID,
                    f"{header} may have {LONGEST_SESSION} characters, not {len(name)}",
                )
            return name
    return None


def client_of(scope: Scope) -> str:
    """The owner of an API key if keys are used (`KeyCheck` runs first), else an address."""
    address, _ = scope.get("client") or ("", 0)
    return str(scope.get(OWNER, address))


async def settle_nothing() -> None:
    """The `settle` of `OpenSequences` in the only process."""


class OpenSequences:
    """The open sequences of each client: at most `most`.

    `settle`: returns when all has been released that other processes have ended. It is called
    before a refusal.
    """

    def __init__(self, most: int, settle: Callable[[], Awaitable[None]] = settle_nothing):
        self._most = most
        self._settle = settle
        self._open: Counter[str] = Counter()

    async def claim(self, client: str, held: int, sequences: int, param: str | None) -> None:
        """A call that has `held` sequences open has `sequences` from now on.

        RequestError: INVALID, which names `param`, for more than a client may have, and TOO_MANY.
        """
        if sequences > self._most:
            message = (
                f"the request asks for {sequences} sequences; a client may have {self._most} open"
            )
            raise RequestError(ErrorKind.INVALID, message, param)
        if self._open[client] - held + sequences > self._most:
            await self._settle()
        others = self._open[client] - held
        if others + sequences > self._most:
            raise RequestError(
                ErrorKind.TOO_MANY,
                f"this client has {others} of {self._most} sequences open already",
            )
        self._open[client] += sequences - held

    def release(self, client: str, held: int) -> None:
        self._open[client] -= held
        if not self._open[client]:
            del self._open[client]


class ClientLimit:
    """A client has so many sequences open as `limit` allows; more are refused with 429.

    Only requests that make the engine work count. A call counts as one sequence from its start, so
    a slow body counts too. After its body is read it counts as all the sequences in it
    (`Caller.claim`) until its end.
    """

    def __init__(self, app: ASGIApp, limit: OpenSequences):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = client_of(scope)
        held = 0

        async def claim(sequences: int, param: str | None = None) -> None:
            nonlocal held
            if sequences != held:
                await self._limit.claim(client, held, sequences, param)
                held = sequences

        try:
            await claim(1)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope[CLAIM] = claim
        try:
            await self._app(scope, receive, send)
        finally:
            self._limit.release(client, held)


class BodyLimit:
    """Refuses a body of more than `most` bytes with 413, as soon as its size is known, and a
    compressed one with 415."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        encoding = headers.get(b"content-encoding", b"").decode("latin-1")
        codings = {coding.strip().lower() for coding in encoding.split(",")}
        has_body = int(announced) > 0 or b"transfer-encoding" in headers
        if has_body and codings & COMPRESSIONS:
            error = RequestError(
                ErrorKind.INVALID,
                f"the body is compressed ({encoding[:64]}), and this server reads plain JSON only: "
                "switch off the compression of requests in the client or the proxy, so that they "
                "come without Content-Encoding",
            )
            await error_response(error, scope["path"], 415)(scope, receive, send)
            return
        if int(announced) > self._most:
            await error_response(self._error(), scope["path"])(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                # raised where the body is read: the application answers it like all refusals
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> RequestError:
        return RequestError(
            ErrorKind.TOO_LARGE, f"the body is longer than the {self._most} bytes allowed here"
        )


class HeadAsGet:
    """Answers HEAD wherever there is GET: with its headers, without its body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class SecurityHeaders:
    """Adds SECURITY_HEADERS to answers that do not have their own. They forbid a browser to load or
    embed anything."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(header for header in SECURITY_HEADERS if header[0] not in given),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)


class ClientErrors:
    """Calls `count` with the status of each answer from 400 to 499."""

    def __init__(self, app: ASGIApp, count: Callable[[int], None]):
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 500:
                self._count(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
