"""The application for `serve run` and `serve deploy`: replicas that each run a `pensieve serve` of
their own."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from .relay import Relay
from .server import ServerProcess

# for open requests after the server has ended, and for other replicas' metrics
SECONDS_TO_ANSWER = 5.0


class Arguments(BaseModel):
    """`args` of the configuration."""

    model_config = ConfigDict(extra="forbid")

    options: str
    """Of `pensieve serve`, as on its command line."""
    state_dir: str = "~/.local/state/pensieve/ray-serve"
    """Each replica of a host takes a directory below it."""


@serve.deployment(
    max_ongoing_requests=1024,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=120,
    request_router_config={
        "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    },
)
@serve.ingress()
class Pensieve:
    async def __init__(self, arguments: Arguments):  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._deployment = context.deployment
        self._app = context.app_name
        states = Path(arguments.state_dir).expanduser()
        self._server = await asyncio.to_thread(
            ServerProcess, shlex.split(arguments.options), states, self._end_with_server
        )
        self._relay = Relay(self._server.url, self._name)
        await self._until_served()

    async def _until_served(self) -> None:
        """While the engine starts, the server does not answer this path."""
        while self._server.status is None:
            try:
                status, _ = await self._relay.get("/version")
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
                continue
            if status == 200:
                return
        raise RuntimeError(
            f"pensieve serve ended with status {self._server.status}; its log has the reason"
        )

    def _end_with_server(self) -> None:
        """Without its server the replica is of no use. When its process ends, Ray sends requests
        elsewhere at once."""
        until = time.monotonic() + SECONDS_TO_ANSWER
        while self._relay.open_requests and time.monotonic() < until:
            time.sleep(0.02)
        os._exit(1)

    async def check_health(self) -> None:
        status, text = await self._relay.get("/health")
        if status != 200:
            raise RuntimeError(f"pensieve serve answers {status}: {text}")

    async def __del__(self) -> None:
        """Called by Serve when the requests of this replica have ended."""
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)
        if hasattr(self, "_relay"):
            await self._relay.close()

    def labels(self) -> str:
        """This replica's labels for `/replicas`, as JSON. Prometheus drops labels that begin with
        `__meta`; they are for programs that look for replicas."""
        labels = {"__param_replica": self._name, "instance": self._name}
        node = ray.util.get_node_ip_address()
        for name, address in self._server.kv_events.items():
            labels[f"__meta_kv_events_{name}"] = address.replace("*", node)
        return json.dumps(labels)

    async def metrics_of(self, replica: str) -> str | None:
        return (await self._relay.get("/metrics"))[1] if replica == self._name else None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        own = [Route("/replicas", self._targets), Route("/metrics", self._metrics)]
        return Starlette(routes=[*own, Mount("/", self._relay)])

    async def _gather(self, method: str, *arguments: str) -> list[str]:
        """What the replicas answer that do answer."""
        handle = serve.get_deployment_handle(self._deployment, self._app)
        results = handle.broadcast(method, *arguments).results_async(
            timeout_s=SECONDS_TO_ANSWER, return_exceptions=True
        )
        return [result for result in await results if isinstance(result, str)]

    async def _targets(self, request: Request) -> Response:
        """For Prometheus' `http_sd_configs`: one target for each replica, all at this address."""
        replicas = map(json.loads, sorted(await self._gather("labels")))
        return JSONResponse([{"targets": [request.url.netloc], "labels": one} for one in replicas])

    async def _metrics(self, request: Request) -> Response:
        """Of the replica that is asked for, else of this one."""
        texts = await self._gather("metrics_of", request.query_params.get("replica", self._name))
        if not texts:
            return PlainTextResponse("there is no such replica\n", 404)
        return PlainTextResponse(texts[0], media_type="text/plain; version=0.0.4")


def build(arguments: dict[str, Any]) -> serve.Application:
    return Pensieve.bind(Arguments(**arguments))  # type: ignore[attr-defined]
