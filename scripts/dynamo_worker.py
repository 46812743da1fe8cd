"""Registers a running server as a worker of NVIDIA Dynamo.

    pensieve serve --engine DIR --kv-events-config '{"enable_kv_cache_events": true}'
    pensieve dynamo-worker --checkpoint DIR --kv-events tcp://127.0.0.1:5557

Dynamo's frontend tokenises a request and chooses the worker. The worker hands the tokens to the
server's /v1/completions, and the server's KV events to Dynamo's router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from importlib.util import find_spec
from typing import Any

import aiohttp

from ..runtime.launch.command_line import CommandParser

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
STOPPING = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids")
BY_DYNAMO = {"stop", "stop_token_ids_hidden", "stop_token_ids_visible"}
"""Stopping conditions that Dynamo's frontend applies to the text itself."""
NOT_TEXT = ("multi_modal_data", "prompt_embeds")
CONNECT_S = 10.0
LOOK_S = 2.0
FAILURES = 3
LONGEST_EVENT = 2**24  # bytes: the first one repeats the prompt's ids
MOST_OF_TEXT = 500  # characters of an answer that is no error of the server's
GRAMMARS = ("json", "regex", "choice", "grammar")


def main(argv: Sequence[str] | None = None) -> int:
    command = CommandParser(
        prog="pensieve dynamo-worker", description=(__doc__ or "").split("\n")[0]
    )
    add_options(command)
    args = command.parse_args(argv)
    if find_spec("dynamo") is None:
        reason = "Dynamo is not installed: pip install 'pensieve[dynamo]'"
        print(f"pensieve dynamo-worker: {reason}", file=sys.stderr)
        return 2
    return asyncio.run(serve(args))


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)"
    )
    command.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="the model's folder with its tokenizer"
    )
    command.add_argument(
        "--kv-events", metavar="ENDPOINT", help="where the server publishes KV events"
    )
    command.add_argument(
        "--api-key", default=os.environ.get("PENSIEVE_API_KEY"), help="the server's key, if any"
    )
    command.add_argument(
        "--endpoint",
        default="pensieve.backend.generate",
        help="the worker's name in Dynamo: namespace.component.endpoint (default %(default)s)",
    )
    for option in ("--dyn-tool-call-parser", "--dyn-reasoning-parser"):
        command.add_argument(option, metavar="NAME", help="Dynamo's parser, as of its own workers")
    for option, variable, default in (
        ("--discovery-backend", "DYN_DISCOVERY_BACKEND", "etcd"),
        ("--request-plane", "DYN_REQUEST_PLANE", "tcp"),
        ("--event-plane", "DYN_EVENT_PLANE", None),
    ):
        command.add_argument(
            option,
            default=os.environ.get(variable, default),
            help=f"as of dynamo.frontend (or {variable}; default %(default)s)",
        )


async def serve(args: argparse.Namespace) -> int:
    """Serves Dynamo's requests until the process is stopped, or the server is gone: then Dynamo
    must not send it requests. Returns the exit status."""
    from dynamo.llm import (
        KvEventPublisher,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(
        asyncio.get_running_loop(),
        args.discovery_backend,
        args.request_plane,
        event_plane=args.event_plane,
    )
    endpoint = runtime.endpoint(args.endpoint)
    async with PensieveServer(args.url, args.api_key) as server:
        model, context_tokens = await server.model()
        chunk_tokens = await server.chunk_tokens()
        config = ModelRuntimeConfig()
        config.context_length = context_tokens
        config.tool_call_parser = args.dyn_tool_call_parser
        config.reasoning_parser = args.dyn_reasoning_parser
        config.kv_event_publishing_enabled = args.kv_events is not None
        config.enable_local_indexer = args.kv_events is not None
        if args.kv_events is not None:
            publisher = KvEventPublisher(
                endpoint,
                kv_block_size=chunk_tokens,
                enable_local_indexer=True,
                zmq_endpoint=args.kv_events,
            )
        serving = asyncio.ensure_future(endpoint.serve_endpoint(server.generate))
        await register_model(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            args.checkpoint,
            model,
            worker_type=WorkerType.Aggregated,
            kv_cache_block_size=chunk_tokens,
            runtime_config=config,
        )
        print(f"{model} is registered as {args.endpoint}", file=sys.stderr, flush=True)
        gone = asyncio.ensure_future(server.gone())
        await asyncio.wait((serving, gone), return_when=asyncio.FIRST_COMPLETED)
        if args.kv_events is not None:
            publisher.shutdown()
        if not gone.done():
            gone.cancel()
            serving.result()  # raises its error
            return 0
        print(f"pensieve dynamo-worker: {args.url} does not answer", file=sys.stderr, flush=True)
        runtime.shutdown()
        return 1


class PensieveServer:
    """A running `pensieve serve`."""

    def __init__(self, url: str, key: str | None):
        self._context_tokens = 0  # until `model` is called
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=LONGEST_EVENT,
            raise_for_status=True,
        )

    async def __aenter__(self) -> PensieveServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> tuple[str, int]:
        """The name that it is served by, and the longest context in tokens."""
        async with self._session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]
            self._context_tokens = model["max_model_len"]
            return model["id"], self._context_tokens

    async def gone(self) -> None:
        """Returns when the server, or its engine, has failed several times in a row."""
        failures = 0
        limit = aiohttp.ClientTimeout(total=CONNECT_S)
        while failures < FAILURES:
            await asyncio.sleep(LOOK_S)
            try:
                async with self._session.get("/live", timeout=limit):
                    failures = 0
            except (aiohttp.ClientError, TimeoutError):
                failures += 1

    async def chunk_tokens(self) -> int:
        """Tokens of a chunk of KV: Dynamo's block size."""
        async with self._session.get("/metrics") as answer:
            block_size = re.search(r'cache_config_info\{block_size="(\d+)"', await answer.text())
        if block_size is None:
            raise RuntimeError("the server's /metrics has no vllm:cache_config_info")
        return int(block_size[1])

    async def generate(
        self, request: dict[str, Any], context: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Dynamo's chunks of a reply: `token_ids`, at the end `finish_reason` and
        `completion_usage`. A request that Dynamo stops is aborted on the server."""
        from dynamo.llm import HttpError

        try:
            body = completion(request, self._context_tokens)
        except ValueError as error:
            raise HttpError(400, str(error)) from None
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        post = asyncio.ensure_future(
            self._session.post("/v1/completions", json=body, raise_for_status=False)
        )
        try:
            await asyncio.wait((post, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                return
            async with post.result() as answer:
                if answer.status != 200:
                    raise HttpError(answer.status, await refusal(answer))
                async for chunk in reply_chunks(until(stopped, answer.content)):
                    yield chunk
        finally:
            post.cancel()
            stopped.cancel()


async def until(
    stopped: asyncio.Future[Any], stream: AsyncIterable[bytes]
) -> AsyncIterator[dict[str, Any]]:
    """The events of the server's stream, until it ends or `stopped` is done."""
    lines = aiter(stream)
    while True:
        line = asyncio.ensure_future(anext(lines, b""))
        await asyncio.wait((line, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not line.done():
            line.cancel()
            return
        if not line.result():
            return
        if line.result().startswith(b"data: {"):
            yield json.loads(line.result()[6:])


async def reply_chunks(events: AsyncIterable[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """What Dynamo gets for the events. Its last chunk has the reason of the end and the usage,
    which the server sends apart.

    RuntimeError: the server could not finish the reply.
    """
    last: dict[str, Any] = {}
    async for event in events:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        if event["usage"] is not None:
            yield last | {"completion_usage": event["usage"]}
            return
        (choice,) = event["choices"]
        last = {"token_ids": choice["token_ids"]}
        if choice["finish_reason"] is not None:
            last["finish_reason"] = choice["finish_reason"]
        elif last["token_ids"]:
            yield last


def completion(request: dict[str, Any], context_tokens: int) -> dict[str, Any]:
    """The body of /v1/completions for a request that Dynamo has tokenised. Without a limit of its
    own, a reply may fill the context.

    ValueError: it asks for something that the body cannot say.
    """
    sampling = given(request["sampling_options"])
    stopping = given(request["stop_conditions"])
    body = {
        "model": request["model"],
        "prompt": request["token_ids"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": context_tokens,
    }
    body |= {name: sampling.pop(name) for name in SAMPLING if name in sampling}
    body |= {name: stopping.pop(name) for name in STOPPING if name in stopping}
    grammar = given(sampling.pop("guided_decoding", None))
    kind = next((name for name in GRAMMARS if name in grammar), None)
    if kind is not None:
        body["structured_outputs"] = {kind: grammar.pop(kind)}
    if sampling.get("n") == 1:
        del sampling["n"]
    output = given(request.get("output_options"))
    output.pop("skip_special_tokens", None)  # Dynamo makes the text
    session = (request.get("agent_context") or {}).get("session_id")
    if session is not None:
        body["session_id"] = session
    extra = (request.get("extra_args") or {}).get("nvext") or {}
    salt = (request.get("routing") or {}).get("cache_salt") or extra.get("cache_salt")
    if salt is not None:
        body["cache_salt"] = salt
    unknown = [*sampling, *(stopping.keys() - BY_DYNAMO), *grammar, *output]
    unknown += [name for name in NOT_TEXT if request.get(name)]
    if unknown:
        raise ValueError(f"pensieve dynamo-worker cannot pass on {', '.join(sorted(unknown))}")
    return body


def given(options: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of what is set."""
    return {
        name: value
        for name, value in (options or {}).items()
        if value is not None and value is not False
    }


async def refusal(answer: aiohttp.ClientResponse) -> str:
    """The server's words, or a proxy's."""
    text = await answer.text()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:MOST_OF_TEXT]
