"""The page at /ui: its files and /ui/state, the state that it shows. It chats through the public
API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ..frontend.engine_client import EngineClient
from ..observe.metrics import Metrics
from .auth import owner_of

MOST_CONVERSATIONS = 2000  # on the map; the latest ones

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",  # only its policy may make HTML of text
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-cache",
}


class File(NamedTuple):
    kind: str
    content: bytes


KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
FOLDER = Path(__file__).parent / "ui"
UI_FILES = {
    "/ui" if path.name == "index.html" else f"/ui/{path.relative_to(FOLDER).as_posix()}": File(
        KINDS[path.suffix], path.read_bytes()
    )
    for path in sorted(FOLDER.rglob("*.*"))
    if path.suffix in KINDS
}
"""By URL path: a request's path never reaches the file system. Licenses are not served."""


def add_ui(app: FastAPI, client: EngineClient, about: Callable[[], dict[str, Any]]) -> None:
    """Adds the page. Its files need no key, because they contain no data; the state shows owners
    their own conversations. `about`: the server, as `/health` describes it."""

    @app.get("/ui/state")
    async def state(request: Request) -> Response:
        client.refresh()
        state = _state(client, owner_of(request)) | about()
        return JSONResponse(state, headers=HEADERS | {"cache-control": "no-store"})

    for path, file in UI_FILES.items():
        app.get(path, include_in_schema=False)(_sender(file))


def _sender(file: File) -> Any:
    async def send() -> Response:
        return Response(file.content, media_type=file.kind, headers=HEADERS)

    return send


def _state(client: EngineClient, owner: str) -> dict[str, Any]:
    """Counters since the start, which the page turns into rates, and for each conversation its
    name and its chunks by tier. `moves` counts chunks too; a drop is an
    eviction that left no copy, as counted by `pensieve:kv_evictions`."""
    metrics = client.metrics
    stats = metrics.stats
    return {
        "seconds": time.monotonic(),
        "chunk_tokens": client.kv_map.chunk_tokens,
        "conversations": list(islice(client.kv_map.of(owner), MOST_CONVERSATIONS)),
        "running": stats.running,
        "waiting": stats.waiting,
        "moves": {
            "swap_in": stats.swapped_in,
            "swap_out": stats.swapped_out,
            "promote": stats.promoted,
            "spill": stats.spilled,
            "drop": sum(reasons["dropped"] for reasons in stats.evictions.values()),
        },
        "slots": stats.slots,
        "generated": metrics.generation_tokens,
        "prompts": metrics.prompt_tokens,
        "copied": metrics.copied._asdict(),
        "first_token": dict(_first_token(metrics)),
    }


def _first_token(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """`sum` (seconds) and `count` of the times to first token."""
    for family in metrics.time_to_first_token.collect():
        for sample in family.samples:
            name = sample.name.rpartition("_")[2]
            if name in ("sum", "count"):
                yield name, sample.value
