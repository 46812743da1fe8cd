"""A stop string that is a special token ends a reply, although such a token has no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.messages import Submit

from ..fake_loop import FakeLoop, byte_tokens

PAD = 0
TOLD = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["<pad>", "xyz"]}, "stop_reason"),
        ("/v1/chat/completions", {"messages": TOLD, "stop": "<pad>"}, "stop_reason"),
        (
            "/v1/messages",
            {"messages": TOLD, "max_tokens": 50, "stop_sequences": ["<pad>"]},
            "stop_sequence",
        ),
    ],
)
def test_a_special_token_stops_a_reply(
    ask: Callable[..., Any], path: str, fields: Any, where: str
) -> None:
    loop = FakeLoop(lambda _: [*byte_tokens("abc"), PAD])

    async def work(http: httpx.AsyncClient) -> Any:
        return (await http.post(path, json={"model": "fake", **fields})).json()

    answer = ask(work, loop)
    (submitted,) = (message.request for message in loop.messages(Submit))
    assert PAD in submitted.stop_ids
    assert submitted.confirm == ("xyz" in str(fields))
    told = answer if path == "/v1/messages" else answer["choices"][0]
    assert told[where] == "<pad>"
    assert "abc" in str(answer) and "<pad>" not in str(told.get("text", told.get("content")))
