"""The HTTP process from its socket to its end: answers probes while the engine starts, then serves
the API."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...scheduler.types import ErrorKind, RequestError
from ..conversations.store import HistoryStore
from ..conversations.turns import TurnManager
from ..frontend.engine_client import EngineClient
from ..frontend.errors import error_response
from ..messages import Ready
from ..observe.logs import configure_logging
from ..text.tokenizer import Tokenizer
from .app import create_app
from .connection_limits import MOST_HEAD_BYTES, PatientProtocol, allow_connections
from .settings import DEFAULTS, HTTPSettings

log = logging.getLogger(__name__)

CLOSING_SECONDS = 5  # for clients to read the end of their replies after the engine has ended
# answered while the engine starts
EARLY_PROBES = {"/health": 503, "/ping": 503, "/ready": 503, "/live": 200}
KEEP_ALIVE_SECONDS = 75
"""The time that a connection may be idle. Balancers keep theirs for 60 s (nginx, AWS). They must
close first; otherwise a request that arrives at that moment is lost."""


def serve_http(
    connection: Connection, listener: socket.socket, settings: HTTPSettings = DEFAULTS
) -> None:
    """The HTTP process's main: serves from the loop's `Ready` until the loop closes its end of
    `connection`.

    The parent handles signals: it drains, then closes the pipe. By then every reply has ended;
    clients get CLOSING_SECONDS to read the rest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(settings.log_format, settings.log_level)
    asyncio.run(_serve(connection, listener, settings))


async def _serve(connection: Connection, listener: socket.socket, settings: HTTPSettings) -> None:
    connections = allow_connections(settings.max_connections)
    if connections < settings.max_connections:
        log.warning(
            "at most %d connections: the system allows no more open files (ulimit -n)", connections
        )
    door = FrontDoor()
    server = _Server(
        uvicorn.Config(
            door,
            # Called by uvicorn to make a protocol.
            http=functools.partial(
                PatientProtocol, most=connections, patience=settings.client_timeout
            ),  # type: ignore[arg-type]
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # clients' errors are not logged
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
    )
    async with contextlib.AsyncExitStack() as behind:
        starter = asyncio.create_task(_start_and_stop(server, door, connection, settings, behind))
        await server.serve(sockets=[listener])
        await starter


async def _start_and_stop(
    server: uvicorn.Server,
    door: FrontDoor,
    connection: Connection,
    settings: HTTPSettings,
    behind: contextlib.AsyncExitStack,
) -> None:
    """Opens the door when the engine is ready, and ends the server when the engine has ended.

    `behind` gets the objects to close after the last request.
    """
    try:
        ready = await asyncio.to_thread(_first_message, connection)
        if isinstance(ready, Ready):
            tokenizer = None
            if ready.tokenizer:
                tokenizer = await asyncio.to_thread(
                    Tokenizer.load, ready.tokenizer, settings.chat_template
                )
            client = EngineClient(connection)
            tracing = None
            if settings.otlp_traces_endpoint is not None:
                from ..frontend.otel import Tracing  # needs the extra `otel`

                tracing = Tracing(settings.otlp_traces_endpoint, ready.model)
                behind.callback(tracing.close)
            store = HistoryStore(
                settings.histories,
                settings.history_ttl,
                settings.max_conversations_per_owner,
                settings.server,
            )
            histories = TurnManager(store, client.tell, client.forget, tokenizer)
            behind.push_async_callback(histories.close)
            histories.expire_in_background()
            door.open(create_app(client, ready, tokenizer, settings, histories, tracing))
            await client.closed.wait()
    finally:
        door.close()
        server.should_exit = True


def _first_message(connection: Connection) -> object:
    """Returns the first message, or None if the start failed; the parent reports the reason."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


class FrontDoor:
    """ASGI: while the engine starts, probes are answered and all other requests wait; then it is
    the application."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._decided = asyncio.Event()

    def open(self, app: ASGIApp) -> None:
        self._app = app
        self._decided.set()

    def close(self) -> None:
        """Ends the waiting of requests; an application that is set stays. Idempotent."""
        self._decided.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["path"] in EARLY_PROBES:
            await Response(status_code=EARLY_PROBES[scope["path"]])(scope, receive, send)
            return
        await self._decided.wait()
        app = self._app or error_response(
            RequestError(ErrorKind.UNAVAILABLE, "the server did not start"), scope["path"]
        )
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn alone, CLOSING_SECONDS after the engine's end
            log.warning("the server ends, but a client has not read its reply: it is cut off")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: `serve_http` ignores them."""
        yield
