"""The page about the API (docs/use/http-api.md) has each endpoint and each field, and none that
does not exist."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pensieve.runtime.http.openapi import BODIES

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "http-api.md").read_text()
GENERATE = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
}
SAME_BODY = ("/render", "/input_tokens")  # their bodies are those of the paths before
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
Ask = Callable[..., Any]


def rows(*header: str) -> Iterator[list[str]]:
    """The cells of all tables with this header."""
    first = "| " + " | ".join(header) + " |"
    for table in re.findall(rf"^{re.escape(first)}\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for line in table.splitlines():
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def paths(where: str) -> list[str]:
    words = list(GENERATE) if where == "all" else where.split(", ")
    return [GENERATE.get(word, word) for word in words]


def fields(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


@pytest.fixture
def document(ask: Ask) -> Any:
    return ask(lambda http: http.get("/openapi.json")).json()


def test_the_page_has_every_endpoint_and_no_other(ask: Ask, document: Any) -> None:
    served = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    named = set(re.findall(rf"`({'|'.join(METHODS)}) ([^`\s?]+)`", PAGE))
    assert len(served) > 20 and not served - named
    # the page and the document itself: the document leaves them out
    for method, path in named - served:

        async def look(http: httpx.AsyncClient, path: str = path) -> httpx.Response:
            return await http.get(path)

        assert method == "GET" and ask(look).status_code in (200, 307), path


def test_the_page_has_every_path_that_its_text_names(document: Any) -> None:
    others = {"/", "/ui", "/openapi.json"}
    named = set(re.findall(r"`(/[\w/{}.]*)`", PAGE))
    assert len(named) > 5 and named <= others | document["paths"].keys()


def test_the_page_has_every_field_and_no_other(document: Any) -> None:
    schemas = document["components"]["schemas"]
    documented = defaultdict(set)
    for cell, where, _ in rows("field", "where", "meaning"):
        for path in paths(where):
            documented[path] |= fields(cell)
    taken = {
        path: schemas[
            operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        ]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation and not path.endswith(SAME_BODY)
    }
    assert len(taken) > 10
    assert documented == {path: set(schema["properties"]) for path, schema in taken.items()}


def test_the_page_has_every_field_that_is_accepted_without_effect() -> None:
    documented = defaultdict(set)
    for where, cell in rows("where", "fields"):
        for path in paths(where):
            documented[path, "post"] |= fields(cell)
    assert documented == {
        place: set(body.IGNORED)
        for place, body in BODIES.items()
        if body.IGNORED and not place[0].endswith(SAME_BODY)
    }
