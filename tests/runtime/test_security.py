"""The headers of every answer, the contents of /openapi.json, and paths that no request can
reach."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.http.openapi import BODIES

TRAVERSALS = (
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "/etc/passwd",
    "a%00b",
)
WATCHED = ("open", "os.listdir", "os.scandir", "sqlite3.connect")
PLACES = ("/", "/ui/", "/v1/models/", "/v1/conversations/", "/v1/responses/", "/static/")


def test_every_answer_says_that_it_loads_nothing(ask: Callable[..., Any]) -> None:
    async def several(http: httpx.AsyncClient) -> list[httpx.Response]:
        paths = ("/health", "/metrics", "/v1/models", "/nothing", "/openapi.json", "/ui")
        stream = {"prompt": [9], "stream": True}
        return [
            await http.post("/v1/completions", json=stream),
            *[await http.get(path) for path in paths],
        ]

    for response in ask(several):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in response.headers.get_list("content-security-policy")[0]
        assert len(response.headers.get_list("content-security-policy")) == 1
        assert "server" not in response.headers


def test_no_page_that_loads_scripts_from_elsewhere(ask: Callable[..., Any]) -> None:
    for path in ("/docs", "/redoc"):
        assert ask(lambda http, path=path: http.get(path)).status_code == 404


def test_no_path_from_a_request_to_the_file_system(ask: Callable[..., Any]) -> None:
    """With any name of a conversation, a model or a page, no file is opened."""
    opened: list[str] = []
    watching = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        # FastAPI names the endpoint
        if watching and event in WATCHED and not str(arguments[0]).endswith(".py"):
            opened.append(f"{event} {arguments[0]}")

    sys.addaudithook(audit)  # for good: Python has no way to take it away

    async def try_all(http: httpx.AsyncClient) -> None:
        nonlocal watching
        # loads lazily loaded parts before the check
        await http.post("/v1/completions", json={"prompt": "x", "conversation": "first"})
        watching = True
        for place in PLACES:
            for path in TRAVERSALS:
                assert (await http.get(place + path)).status_code in (404, 405), place + path
        for name in TRAVERSALS:
            body = {"prompt": "x", "max_tokens": 2, "conversation": name}
            assert (await http.post("/v1/completions", json=body)).is_success
            assert (
                await http.post("/v1/completions", json={"prompt": "x", "model": name})
            ).status_code == 404
        watching = False

    ask(try_all)
    assert not opened


def test_openapi_says_what_bodies_are(ask: Callable[..., Any]) -> None:
    document = ask(lambda http: http.get("/openapi.json")).json()
    for path, method in BODIES:
        schema = document["paths"][path][method]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert document["components"]["schemas"][name]["properties"]


@pytest.mark.parametrize("depth", [10, 1000, 300_000])
def test_deep_json_is_the_clients_fault(ask: Callable[..., Any], depth: int) -> None:
    response = ask(lambda http: http.post("/v1/completions", content=b'{"prompt": ' + b"[" * depth))
    assert response.status_code == 400
    response = ask(
        lambda http: http.post("/v1/completions", content=b'{"a":' * depth + b"1" + b"}" * depth)
    )
    assert response.status_code == 400
