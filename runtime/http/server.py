"""uvicorn's server with our connections, and the door in front of an application that is not there
yet."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.errors import error_response
from ..messages import Ready
from ..text.tokenizer import Tokenizer
from .connection_limits import MOST_HEAD_BYTES, PatientProtocol, allow_connections
from .settings import HTTPSettings

if TYPE_CHECKING:
    from ..frontend.otel import Tracing  # needs the extra `otel`

log = logging.getLogger(__name__)

CLOSING_SECONDS = 5  # for clients to read the end of their replies after the engine has ended
# answered while the engine starts
EARLY_PROBES = {"/health": 503, "/ping": 503, "/ready": 503, "/live": 200}
KEEP_ALIVE_SECONDS = 75
"""The time that a connection may be idle. Balancers keep theirs for 60 s (nginx, AWS). They must
close first; otherwise a request that arrives at that moment is lost."""


class FrontDoor:
    """ASGI: while the engine starts, probes are answered and all other requests wait; then it is
    the application. `decided` is set then."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self.decided = asyncio.Event()

    def open(self, app: ASGIApp) -> None:
        self._app = app
        self.decided.set()

    def close(self) -> None:
        """Ends the waiting of requests; an application that is set stays. Idempotent."""
        self.decided.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["path"] in EARLY_PROBES:
            await Response(status_code=EARLY_PROBES[scope["path"]])(scope, receive, send)
            return
        await self.decided.wait()
        app = self._app or error_response(
            RequestError(ErrorKind.UNAVAILABLE, "the server did not start"), scope["path"]
        )
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # by uvicorn alone, CLOSING_SECONDS after the engine's end
            log.warning("the server ends, but a client has not read its reply: it is cut off")


class HTTPServer(uvicorn.Server):
    """Serves the door's application at the sockets that `serve` gets, and on the connections that
    `connect` gets, until `should_exit`. `up` is set when it does."""

    def __init__(self, door: FrontDoor, settings: HTTPSettings):
        self.up = asyncio.Event()
        connections = allow_connections(settings.max_connections)
        if connections < settings.max_connections:
            log.warning(
                "at most %d connections: the system allows no more open files (ulimit -n)",
                connections,
            )
        super().__init__(
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def connect(
        self, connection: socket.socket, is_refused: bool, lost: Callable[[], None]
    ) -> None:
        """Serves an accepted connection, or tells it that there are too many. `lost` is called at
        its end."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        make = functools.partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
            lost=lost,
            **({"most": 0} if is_refused else {}),
        )
        await loop.connect_accepted_socket(make, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: they are the parent's."""
        yield


def freeze_objects() -> None:
    """Collections of garbage leave out all objects that exist now: those of libraries take 40 ms,
    in which every stream would pause."""
    gc.collect()
    gc.freeze()


async def load_tokenizer(ready: Ready, settings: HTTPSettings) -> Tokenizer | None:
    if not ready.tokenizer:
        return None
    return await asyncio.to_thread(Tokenizer.load, ready.tokenizer, settings.chat_template)


def open_tracing(
    ready: Ready, settings: HTTPSettings, behind: contextlib.AsyncExitStack
) -> Tracing | None:
    """`behind` closes it."""
    if settings.otlp_traces_endpoint is None:
        return None
    from ..frontend.otel import Tracing  # needs the extra `otel`

    tracing = Tracing(settings.otlp_traces_endpoint, ready.model)
    behind.callback(tracing.close)
    return tracing
