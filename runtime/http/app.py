"""The HTTP process: OpenAI's and Anthropic's endpoints over an EngineClient.

A call passes these stages: body -> `Generate` -> `GenerationCall` (checked, tokenized) -> requests
to the engine loop -> `Answer` writes the outputs, whole or as server-sent events. If the client
hangs up, its requests are aborted, or end with `on_disconnect: store`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ... import __version__
from ...builder.choices import GPU_TIER_NAMES
from ...scheduler.types import LABELS, ErrorKind, RequestError, RowResult
from ..conversations.store import HistoryStore
from ..conversations.turns import TurnManager, Turns
from ..frontend.bodies import ChatBody, CompletionBody
from ..frontend.calls import Caller, GenerationCall, answering
from ..frontend.engine_client import ClientGone, EngineClient, EngineStreams, OutputStream
from ..frontend.errors import ANTHROPIC_VERSION, error_response
from ..frontend.generate import Generate
from ..frontend.reply import Reply
from ..frontend.reply_forms import reply_forms
from ..frontend.request_builder import GrammarChecks, RequestBuilder, check_model
from ..messages import Ready
from ..observe.vllm_metrics import VllmMetrics
from ..text.tokenizer import Tokenizer
from .auth import OWNER, KeyCheck
from .connection_limits import WRITE
from .conversations import add_conversations
from .event_sender import Write, write_nothing
from .json_response import json_response, long_json_response
from .limits import (
    BodyLimit,
    ClientErrors,
    ClientLimit,
    HeadAsGet,
    OpenSequences,
    SecurityHeaders,
    caller_of,
)
from .messages import MessageBody, PromptBody
from .models import add_models
from .openapi import describe_bodies
from .page import UI_FILES, add_ui
from .reply_events import ReplyEvents
from .request_body import IgnoredFields, read_body, say_ignored
from .responses import CountedBody, ResponseBody, add_responses, with_stored_items
from .sessions import add_sessions
from .settings import DEFAULTS, HTTPSettings
from .tokenize import add_tokenize

if TYPE_CHECKING:
    from ..frontend.otel import Tracing  # needs the extra `otel`

log = logging.getLogger(__name__)

GeneratingBody = CompletionBody | ChatBody | ResponseBody | MessageBody

OPEN_PATHS = frozenset(
    {"/", "/health", "/live", "/metrics", "/ping", "/ready", "/version", "/ui/", *UI_FILES}
)
"""Paths that need no API key."""

MOST_UNREAD_BYTES = 64 * 1024**2
"""Of a streamed answer, while its replies still grow. More ends its requests, so that its client
cannot fill the server's memory."""

UNREAD = (
    f"the client has not read {MOST_UNREAD_BYTES // 1024**2} MiB of the answer, so the reply ends "
    "here"
)
TOKENS_LEFT_OUT = (
    "session %r: the count of remaining tokens is left out of its system texts, because it changes "
    "in each prompt (said once); --keep-tokens-left keeps it"
)
MOST_TOKENS_HERE = 16384  # of an answer that the event loop's thread writes
MOST_OF_PATH = 200  # characters of a path that an error repeats
REQUEST_ID = "x-request-id"  # header with the id of the answer and of its log line


class Answer(Response):
    """Submits a call and writes its answer. The status is sent with the first output, so that a
    refusal gets its own status."""

    def __init__(
        self,
        call: GenerationCall,
        client: EngineStreams,
        tokenizer: Tokenizer | None,
        tracing: Tracing | None,
    ):
        super().__init__()
        self._call = call
        self._client = client
        self._tokenizer = tokenizer
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        replies: dict[int, Reply] = {}
        owner = scope.get(OWNER, "")
        count = self._client.count_call
        with contextlib.ExitStack() as around:
            around.enter_context(contextlib.suppress(ClientGone))
            if self._tracing is not None:
                around.enter_context(
                    self._tracing.traced(self._call, scope["headers"], replies.values())
                )
            around.enter_context(answering(self._call, owner, replies.values(), count))
            await self._answer(replies, scope, receive, send)

    async def _answer(
        self, replies: dict[int, Reply], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Fills `replies` first. Raises ClientGone, and RequestError while no status has been
        sent."""
        stream = self._client.submit(self._call.requests, self._call.arrived)
        watch = asyncio.create_task(self._hang_up_with_client(receive, stream, replies))
        try:
            replies |= {
                reply.request.id: reply for reply in self._call.replies(stream, self._tokenizer)
            }
            if self._call.generate.stream:
                await self._send_events(stream, replies, send, scope.get(WRITE, write_nothing))
            else:
                await stream.each(partial(_add_all, replies))
                await self._commit(replies)
                response = await self._whole(list(replies.values()))
                await response(scope, receive, send)
        finally:
            watch.cancel()
            stream.close()

    async def _whole(self, replies: Sequence[Reply]) -> Response:
        """The answer of a call that does not stream, made in another thread if that may take
        long."""
        writer = self._call.writer
        if not _is_long(replies, writer.shows_ids):
            return JSONResponse(writer.whole(replies), headers=self._answer_headers)
        return await asyncio.to_thread(
            lambda: json_response(writer.whole(replies), self._answer_headers)
        )

    @property
    def _answer_headers(self) -> dict[str, str]:
        return {REQUEST_ID: self._call.writer.id, **self._call.writer.HEADERS}

    async def _hang_up_with_client(
        self, receive: Receive, stream: OutputStream, replies: Mapping[int, Reply]
    ) -> None:
        """If the body wishes it, a reply that has begun ends here in the regular way. Otherwise
        nothing of the call is stored."""
        await _hung_up(receive)
        first = next(iter(replies.values()), None)
        if first is None or not (self._call.generate.stores_partial and first.end_here()):
            stream.hang_up()

    async def _send_events(
        self, stream: OutputStream, replies: dict[int, Reply], send: Send, write: Write
    ) -> None:
        """Sends server-sent events. The replies come to their end, and their turn is committed,
        also if the client reads nothing meanwhile."""
        outputs = await stream.next()
        headers = [(name.encode(), value.encode()) for name, value in self._answer_headers.items()]
        events = ReplyEvents(self._call.writer, replies, send, headers, write)
        try:
            await asyncio.sleep(0)  # the start is sent, if the client reads
            await self._write_events(stream, outputs, replies, events)
            stream.close()
            self._call.close(replies.values())
            await events.end()  # from here on only the client is waited for
        finally:
            events.close()

    async def _write_events(
        self,
        stream: OutputStream,
        first: list[RowResult],
        replies: dict[int, Reply],
        events: ReplyEvents,
    ) -> None:
        """Writes the events of all outputs, of which `first` are the first."""
        take = partial(self._take, events)
        try:
            if not take(first):
                await stream.each(take)
            await self._commit(replies)
        except RequestError as error:  # too late for a status
            events.put_end(error)
        else:
            events.put_end()

    def _take(self, events: ReplyEvents, outputs: list[RowResult]) -> bool:
        """Returns True at the end of all replies. Their ends are sent after the commit."""
        for output in outputs:
            events.add(output)
        if not events.unfinished:
            return True
        events.send()
        if events.unread_bytes > MOST_UNREAD_BYTES:
            log.warning("%s: %s", self._call.writer.id, UNREAD)
            raise RequestError(ErrorKind.UNAVAILABLE, UNREAD)
        return False

    async def _commit(self, replies: dict[int, Reply]) -> None:
        """Makes the first reply's turn durable before any end is sent."""
        await self._call.commit(list(replies.values()))
        if self._call.keep is not None:
            self._client.tell(self._call.keep)


def _add_all(replies: Mapping[int, Reply], outputs: list[RowResult]) -> bool:
    """Returns True at the end of all replies."""
    for output in outputs:
        replies[output.request].add(output)
    return all(reply.finish is not None for reply in replies.values())


def _is_long(replies: Sequence[Reply], shows_ids: bool) -> bool:
    """True if the answer has log probabilities, of which one token may have 21, or many tokens. It
    has the prompts' ids only if it `shows_ids`."""
    if any(reply.logprobs or reply.prompt_logprobs for reply in replies):
        return True
    tokens = sum(len(reply.tokens) for reply in replies)
    if shows_ids:
        tokens += sum(len(reply.request.prompt) for reply in replies)
    return tokens > MOST_TOKENS_HERE


def _no_route(request: HTTPRequest, error: HTTPException) -> str:
    """Says what a client with a wrong base URL or method may have meant: /chat/completions is
    /v1/chat/completions."""
    path = request.url.path
    if error.status_code == 405 and error.headers:
        return f"{path[:MOST_OF_PATH]} takes {error.headers['Allow']}, not {request.method}"
    if error.status_code != 404:
        return error.detail
    served = [str(getattr(route, "path", "")) for route in request.app.routes]
    meant = [
        route
        for route in served
        if route.startswith("/v1/") and path.endswith(route.removeprefix("/v1"))
    ]
    hint = f"; did you mean {max(meant, key=len)}?" if meant else ""
    return f"there is no {path[:MOST_OF_PATH]} here{hint}"


async def _unless_gone(receive: Receive, checking: Coroutine[Any, Any, Generate]) -> Generate:
    """Raises ClientDisconnect if the client hangs up meanwhile: other requests wait for the check
    of its grammar."""
    check = asyncio.create_task(checking)
    gone = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((check, gone), return_when=asyncio.FIRST_COMPLETED)
        if not check.done():
            raise ClientDisconnect
        return check.result()
    finally:
        check.cancel()
        gone.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def add_layers(
    app: FastAPI,
    settings: HTTPSettings,
    limit: OpenSequences | None,
    count_error: Callable[[int], None],
) -> None:
    """Adds the layers around each request, and the answers to errors. `limit` as in `ClientLimit`,
    `count_error` as in `ClientErrors`."""
    app.add_middleware(BodyLimit, most=settings.max_body_bytes)
    if not settings.strict_fields:
        app.add_middleware(IgnoredFields)
    if limit is not None:
        app.add_middleware(ClientLimit, limit=limit)
    if settings.api_keys:
        app.add_middleware(KeyCheck, digests=settings.api_keys, open_paths=OPEN_PATHS)
    if settings.cors_origins:  # outside of the key check: a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ClientErrors, count=count_error)

    @app.exception_handler(RequestError)
    async def refuse(request: HTTPRequest, error: RequestError) -> Response:
        to_anthropics = ANTHROPIC_VERSION in request.headers
        return error_response(error, request.url.path, to_anthropics=to_anthropics)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: HTTPRequest, error: HTTPException) -> Response:
        kind = ErrorKind.NOT_FOUND if error.status_code == 404 else ErrorKind.INVALID
        refused = RequestError(kind, _no_route(request, error))
        response = error_response(refused, request.url.path, error.status_code)
        response.headers.update(error.headers or {})  # the allowed methods of a 405
        return response

    @app.exception_handler(ClientDisconnect)
    async def ignore(_: HTTPRequest, error: ClientDisconnect) -> Response:
        # the client is gone in the middle of its body, so this is never read
        return Response(status_code=400)


def add_generation(
    app: FastAPI,
    client: EngineStreams,
    ready: Ready,
    tokenizer: Tokenizer | None,
    settings: HTTPSettings,
    histories: Turns,
    tracing: Tracing | None,
    grammars: GrammarChecks | None = None,
) -> None:
    """Adds the endpoints that generate or count tokens. `grammars` as in `RequestBuilder`."""
    forms = reply_forms(tokenizer, settings.reasoning_parser, settings.tool_call_parser)
    calls = RequestBuilder(ready, tokenizer, histories, client.new_id, forms, grammars=grammars)

    async def answer(kind: type[GeneratingBody], request: HTTPRequest) -> Response:
        arrived = time.perf_counter()
        body = await read_body(kind, request)
        caller = caller_of(request)
        check_model(body.model, ready)
        left_out = False
        if isinstance(body, MessageBody) and not settings.keep_tokens_left:
            given = body
            body = given.without_tokens_left()
            left_out = body is not given
        if isinstance(body, ResponseBody):
            body = await with_items(body, caller)
        # a thread: a body of the largest size takes a second
        generate = await asyncio.to_thread(body.generate)
        if left_out:
            session = caller.session_of(generate) or ""
            histories.say_once((caller.owner, session), TOKENS_LEFT_OUT)
        check = calls.check_form(generate, caller)
        generate = await _unless_gone(request.receive, check)
        remarks = generate.form.remarks if generate.form is not None else ()
        say_ignored(request, (*generate.remarks, *remarks))
        writer = body.writer(ready.model, tokenizer)
        call = await calls.call(generate, writer, arrived, caller)
        return Answer(call, client, tokenizer, tracing)

    @app.post("/v1/completions")
    async def completions(request: HTTPRequest) -> Response:
        return await answer(CompletionBody, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HTTPRequest) -> Response:
        return await answer(ChatBody, request)

    @app.post("/v1/responses")
    async def responses(request: HTTPRequest) -> Response:
        return await answer(ResponseBody, request)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: HTTPRequest) -> dict[str, Any]:
        (prompt,) = await prompts_of(CountedBody, request)
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @app.post("/v1/messages")
    async def messages(request: HTTPRequest) -> Response:
        return await answer(MessageBody, request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: HTTPRequest) -> dict[str, int]:
        (prompt,) = await prompts_of(PromptBody, request)
        return {"input_tokens": len(prompt)}

    @app.post("/v1/completions/render")
    async def render_completion(request: HTTPRequest) -> Response:
        prompts = await prompts_of(CompletionBody, request)
        return await long_json_response([rendered(prompt) for prompt in prompts])

    @app.post("/v1/chat/completions/render")
    async def render_chat(request: HTTPRequest) -> Response:
        (prompt,) = await prompts_of(ChatBody, request)
        return await long_json_response(rendered(prompt))

    @app.post("/v1/messages/render")
    async def render_messages(request: HTTPRequest) -> Response:
        (prompt,) = await prompts_of(MessageBody, request)
        return await long_json_response(rendered(prompt))

    async def with_items(body: ResponseBody, caller: Caller) -> ResponseBody:
        return await with_stored_items(body, histories, caller.owner, settings.max_body_bytes)

    async def prompts_of(
        kind: type[CompletionBody | ChatBody | ResponseBody | PromptBody], request: HTTPRequest
    ) -> list[array[int]]:
        body = await read_body(kind, request)
        check_model(body.model, ready)
        if isinstance(body, ResponseBody):
            body = await with_items(body, caller_of(request))
        if isinstance(body, PromptBody) and not settings.keep_tokens_left:
            body = body.without_tokens_left()
        generate = await asyncio.to_thread(body.generate)
        return await calls.prompts(generate, caller_of(request))

    def rendered(prompt: array[int]) -> dict[str, Any]:
        return {"model": ready.model, "token_ids": prompt.tolist()}

    add_tokenize(app, ready, tokenizer)


def create_app(
    client: EngineClient,
    ready: Ready,
    tokenizer: Tokenizer | None,
    settings: HTTPSettings = DEFAULTS,
    histories: TurnManager | None = None,
    tracing: Tracing | None = None,
    limit: OpenSequences | None = None,
) -> FastAPI:
    """Returns the application that serves the engine of `ready`; without a tokenizer only
    completions of token ids.

    Without `histories`, conversations are kept in memory. With `tracing`, every answered call has a
    span. `limit`: None if the settings have none, or this is the only process.
    """
    if histories is None:
        histories = TurnManager(
            HistoryStore(":memory:", settings.history_ttl), client.tell, client.forget, tokenizer
        )
        histories.expire_in_background()
    # these pages load scripts from other sites
    app = FastAPI(title="Pensieve", docs_url=None, redoc_url=None)
    if limit is None and settings.max_requests_per_client is not None:
        limit = OpenSequences(settings.max_requests_per_client)
    add_layers(app, settings, limit, client.count_error)
    add_generation(app, client, ready, tokenizer, settings, histories, tracing)
    vllm_metrics = VllmMetrics(client.metrics, ready.model, ready.chunk_tokens, ready.gpu_kv_chunks)

    def about() -> dict[str, Any]:
        """Which of several servers this is, where its histories are, what is wrong with them,
        whether there is room for KV on the disk, and what people call the tiers."""
        fault = histories.fault
        store: dict[str, Any] = {"store": histories.kind, "healthy": fault is None}
        if fault is not None:
            store["reason"] = fault
        full = client.metrics.disk.full > 0
        tiers = {label: label for label in LABELS} | {"gpu": GPU_TIER_NAMES[ready.device]}
        return {
            "replica": settings.server,
            "histories": store,
            "kv_disk_full": full,
            "tier_names": tiers,
        }

    add_conversations(app, histories, client, settings.max_body_bytes)
    add_responses(app, histories)
    add_sessions(app, histories)
    add_ui(app, client, about)
    add_models(app, ready)

    @app.get("/health")
    @app.get("/ready")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        """Health of the engine. Without the histories it still answers requests without a name."""
        return JSONResponse(about(), status_code=200 if client.accepting else 503)

    @app.get("/live")
    async def live() -> Response:
        return Response(status_code=200 if client.healthy else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("ui")  # relative, because a proxy may serve it below a path

    @app.get("/metrics")
    async def metrics() -> Response:
        client.metrics.histories_healthy = histories.fault is None
        return Response(client.metrics.text() + vllm_metrics.text(), media_type=CONTENT_TYPE_LATEST)

    describe_bodies(app)
    return app
