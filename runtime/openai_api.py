"""The HTTP process: OpenAI's endpoints over an EngineClient.

The way of a call: body -> `Call` (checked, tokenised) -> requests to the engine loop -> `Answer` writes the outputs,
whole or as server-sent events. A client that hangs up aborts its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ..scheduler.types import RequestError, SettingError
from .api_types import ChatBody, CompletionBody, parse
from .calls import Call, CallMaker
from .engine_client import ClientGone, EngineClient, OutputStream
from .messages import Fatal, Ready
from .replies import Reply
from .text import StopMatcher, Tokenizer

CLOSING_SECONDS = 5  # for clients to read the end of their replies once the engine has ended
RETRY_SECONDS = 1  # told to clients when the queue is full
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Answer(Response):
    """Submits a call and writes its answer. The status is sent when the first output is here: a refusal has its own."""

    def __init__(self, call: Call, client: EngineClient, tokenizer: Tokenizer | None):
        super().__init__()
        self._call, self._client, self._tokenizer = call, client, tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._client.submit(self._call.requests, self._call.arrived)
        watch = asyncio.create_task(_hang_up_with_client(receive, stream))
        try:
            replies = self._replies(stream)
            if self._call.stream:
                await self._send_events(stream, replies, send)
            else:
                unfinished = len(replies)
                while unfinished:
                    for output in await stream.next():
                        reply = replies[output.request]
                        reply.add(output)
                        unfinished -= output.finish is not None
                whole = self._call.writer.whole(list(replies.values()))
                await JSONResponse(whole)(scope, receive, send)
        except ClientGone:
            pass  # there is nobody left to answer
        finally:
            watch.cancel()
            stream.close()

    def _replies(self, stream: OutputStream) -> dict[int, Reply]:
        call = self._call
        return {
            request.id: Reply(
                request,
                stream,
                self._tokenizer,
                StopMatcher(call.stops, call.include_stop, request.min_tokens) if call.stops else None,
                continues_prompt=not call.chat,
                include_stop=call.include_stop,
            )
            for request in call.requests
        }

    async def _send_events(self, stream: OutputStream, replies: dict[int, Reply], send: Send) -> None:
        """Server-sent events, those of one wake-up in one write."""
        writer = self._call.writer
        index = {request: number for number, request in enumerate(replies)}
        outputs = await stream.next()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        events = [writer.opening(list(replies.values()))]
        unfinished = len(replies)
        try:
            while True:
                for output in outputs:
                    reply = replies[output.request]
                    piece = reply.add(output)
                    events.append(writer.piece(index[output.request], piece, reply.finish))
                    unfinished -= output.finish is not None
                if not unfinished:
                    break
                if text := "".join(events):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                events = []
                outputs = await stream.next()
            events.append(writer.closing(list(replies.values())))
        except RequestError as error:  # too late for a status
            events.append(f"data: {json.dumps(_error_object(error))}\n\ndata: [DONE]\n\n")
        await send({"type": "http.response.body", "body": "".join(events).encode()})


async def _hang_up_with_client(receive: Receive, stream: OutputStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.hang_up()


def create_app(client: EngineClient, ready: Ready, tokenizer: Tokenizer | None) -> FastAPI:
    """The application that serves the engine of `ready`; without a tokenizer only completions of token ids."""
    app = FastAPI(title="Pensieve")
    calls = CallMaker(ready, tokenizer, client.new_id)
    created = int(time.time())

    @app.exception_handler(RequestError)
    async def refuse(_: HTTPRequest, error: RequestError) -> Response:
        headers = {"retry-after": str(RETRY_SECONDS)} if error.status == 429 else None
        return JSONResponse(_error_object(error), error.status, headers)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: HTTPRequest, error: HTTPException) -> Response:
        return await refuse(request, RequestError(error.status_code, error.detail))

    @app.post("/v1/completions")
    async def completions(request: HTTPRequest) -> Response:
        arrived = time.perf_counter()
        body = parse(CompletionBody, await request.body())
        return Answer(await calls.completion(body, arrived), client, tokenizer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HTTPRequest) -> Response:
        arrived = time.perf_counter()
        body = parse(ChatBody, await request.body())
        return Answer(await calls.chat(body, arrived), client, tokenizer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": ready.model, "object": "model", "created": created, "owned_by": "pensieve"}
        return {"object": "list", "data": [{**model, "max_model_len": ready.max_model_len}]}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if client.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(client.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's form."""
    kind, code = "invalid_request_error", None
    if error.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before the model is loaded so that a taken port is known at once. Port 0: any free one.

    Raises SettingError. The parent closes its copy once the HTTP process has started.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OverflowError as error:
        raise SettingError("--port", f"must be between 0 and 65535, not {port}") from error
    except OSError as error:
        setting = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise SettingError(setting, f"cannot listen on {host}:{port}: {error.strerror}") from error


def serve_http(connection: Connection, listener: socket.socket) -> None:
    """The HTTP process's main: serves from the loop's `Ready` on until the loop closes its end of `connection`.

    Signals are the parent's affair: it drains, then closes the pipe. By then every reply has ended; clients get
    CLOSING_SECONDS to read the rest.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ready = connection.recv()
    except (EOFError, OSError):
        return  # the start failed, and the parent says why
    if isinstance(ready, Fatal):
        return
    tokenizer = Tokenizer.load(ready.tokenizer) if ready.tokenizer else None
    asyncio.run(_serve(connection, listener, ready, tokenizer))


async def _serve(connection: Connection, listener: socket.socket, ready: Ready, tokenizer: Tokenizer | None) -> None:
    client = EngineClient(connection)
    config = uvicorn.Config(
        create_app(client, ready, tokenizer),
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = _Server(config)
    stopper = asyncio.create_task(_stop_with_engine(server, client))
    await server.serve(sockets=[listener])
    stopper.cancel()


async def _stop_with_engine(server: uvicorn.Server, client: EngineClient) -> None:
    await client.closed.wait()
    server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: `serve_http` ignores them."""
        yield
