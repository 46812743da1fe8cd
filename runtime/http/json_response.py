"""Answers in JSON that may be long.

The library's encoder holds the interpreter lock until it returns, so a long answer is encoded in
pieces, in another thread: between two pieces the event loop's thread runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import Response

LONGEST_LIST = 1024  # elements: those of longer lists are small
SLICE = 64  # elements of a long list in one piece
DEEPEST = 4  # levels that are divided: answer, choices, choice, log probabilities

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the answer. Raises ValueError for a number that JSON does not have."""
    body = bytearray()
    for piece in pieces(value):
        body += piece.encode()
    return Response(bytes(body), media_type="application/json", headers=headers)


async def long_json_response(value: Any) -> Response:
    """As `json_response`, in another thread."""
    return await asyncio.to_thread(json_response, value)


def pieces(value: Any, levels: int = DEEPEST) -> Iterator[str]:
    """The value's JSON, in pieces of a bounded number of values."""
    if isinstance(value, dict) and value and levels and all(isinstance(k, str) for k in value):
        before = "{"
        for name, inner in value.items():
            yield f"{before}{_encode(name)}:"
            yield from pieces(inner, levels - 1)
            before = ","
        yield "}"
    elif isinstance(value, list) and value and (levels or len(value) > LONGEST_LIST):
        yield from _list_pieces(value, levels)
    else:
        yield _encode(value)


def _list_pieces(values: list[Any], levels: int) -> Iterator[str]:
    before = "["
    if len(values) > LONGEST_LIST:
        for start in range(0, len(values), SLICE):
            yield before + _encode(values[start : start + SLICE])[1:-1]
            before = ","
    else:
        for value in values:
            yield before
            yield from pieces(value, levels - 1)
            before = ","
    yield "]"
