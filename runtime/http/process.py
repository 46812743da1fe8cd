"""The HTTP process from its start to its end: answers probes while the engine starts, then serves
the API, by itself or with workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from multiprocessing.connection import Connection

from ..conversations.store import HistoryStore
from ..conversations.turns import TurnManager
from ..frontend.engine_client import EngineClient
from ..frontend.request_builder import GrammarChecks
from ..messages import Ready
from ..observe.logs import configure_logging
from ..system import print_stacks_on_signal
from ..text.tokenizer import Tokenizer
from .app import create_app
from .limits import OpenSequences
from .server import FrontDoor, HTTPServer, freeze_objects, load_tokenizer, open_tracing
from .settings import DEFAULTS, HTTPSettings
from .workers.pool import SharedServices, Workers

log = logging.getLogger(__name__)


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
    print_stacks_on_signal()
    configure_logging(settings.log_format, settings.log_level)
    asyncio.run(_serve(connection, listener, settings))


async def _serve(connection: Connection, listener: socket.socket, settings: HTTPSettings) -> None:
    async with contextlib.AsyncExitStack() as behind:
        if settings.workers:
            workers = Workers(listener, settings)
            starter = asyncio.create_task(_open_workers(workers, connection, settings, behind))
            await workers.serve()
        else:
            door = FrontDoor()
            server = HTTPServer(door, settings)
            starter = asyncio.create_task(
                _open_and_close(server, door, connection, settings, behind)
            )
            await server.serve(sockets=[listener])
        await starter


async def _open_and_close(
    server: HTTPServer,
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
            client = EngineClient(connection)
            tokenizer = await load_tokenizer(ready, settings)
            tracing = open_tracing(ready, settings, behind)
            histories = _open_histories(client, tokenizer, settings, behind)
            app = create_app(client, ready, tokenizer, settings, histories, tracing)
            freeze_objects()
            door.open(app)
            await client.closed.wait()
    finally:
        door.close()
        server.should_exit = True


async def _open_workers(
    workers: Workers,
    connection: Connection,
    settings: HTTPSettings,
    behind: contextlib.AsyncExitStack,
) -> None:
    """As `_open_and_close`, for workers, which have the connections."""
    try:
        ready = await asyncio.to_thread(_first_message, connection)
        if isinstance(ready, Ready):
            client = EngineClient(connection)
            tokenizer = await load_tokenizer(ready, settings)
            histories = _open_histories(client, tokenizer, settings, behind)
            most = settings.max_requests_per_client
            limit = OpenSequences(most, workers.settle) if most is not None else None
            grammars = GrammarChecks(ready)
            app = create_app(client, ready, tokenizer, settings, histories, limit=limit)
            freeze_objects()
            workers.open(
                SharedServices(app, client, ready, histories, grammars, limit, workers.settle)
            )
            await client.closed.wait()
    finally:
        workers.end()


def _open_histories(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    settings: HTTPSettings,
    behind: contextlib.AsyncExitStack,
) -> TurnManager:
    store = HistoryStore(
        settings.histories,
        settings.history_ttl,
        settings.max_conversations_per_owner,
        settings.server,
    )
    histories = TurnManager(store, client.tell, client.forget, tokenizer)
    behind.push_async_callback(histories.close)
    histories.expire_in_background()
    return histories


def _first_message(connection: Connection) -> object:
    """Returns the first message, or None if the start failed; the parent reports the reason."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
