"""The application with a simulated loop, and a tokenizer that does not give a reply's ids for its
text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.http.app import create_app
from pensieve.runtime.http.settings import DEFAULTS, HTTPSettings, key_digest
from pensieve.runtime.messages import Ready, Submit
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import Request

from .fake_loop import FakeLoop, ready
from .odd_tokenizer import byte_by_byte, save_merging

CHAT = "/v1/chat/completions"
DONE = 256 + 14 + 2  # <|done|>


def spell(request: Request) -> list[int]:
    """Answers "hello world" and the length of the prompt, spelt byte by byte."""
    return [*byte_by_byte(f"hello world {len(request.prompt)}"), DONE]


def odd_ready() -> Ready:
    return replace(ready(max_model_len=2000), stop_ids=(DONE,), vocab_size=DONE + 1)


class Served:
    """`http` speaks to an application in this process; `loop` is its engine, `store` its file of
    histories."""

    def __init__(
        self,
        directory: Path,
        path: str | Path,
        keys: tuple[str, ...],
        strict: bool = False,
        keep_tokens_left: bool = False,
        max_body_bytes: int = DEFAULTS.max_body_bytes,
        **loop: Any,
    ):
        self.loop = FakeLoop(**dict(answers=spell) | loop)
        self.client = client = EngineClient(self.loop.client_end)
        settings = HTTPSettings(
            api_keys=tuple(map(key_digest, keys)),
            strict_fields=strict,
            keep_tokens_left=keep_tokens_left,
            max_body_bytes=max_body_bytes,
        )
        tokenizer = Tokenizer.load(directory)
        self.store = HistoryStore(path)
        self.histories = TurnManager(self.store, client.tell, client.forget, tokenizer)
        self.app = create_app(client, odd_ready(), tokenizer, settings, self.histories)
        self.closed = client.closed
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://test"
        )

    async def post(self, path: str, status: int = 200, key: str | None = None, **body: Any) -> Any:
        return await self.ask("POST", path, status, key, json=body)

    async def ask(
        self, method: str, path: str, status: int = 200, key: str | None = None, **options: Any
    ) -> Any:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        response = await self.http.request(method, path, headers=headers, **options)
        assert response.status_code == status, response.text
        return response.json()

    async def chat(self, *contents: str, **body: Any) -> Any:
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": content}
            for at, content in enumerate(contents)
        ]
        answer = await self.post(CHAT, messages=messages, **body)
        return answer["choices"][0]["message"]["content"] if "choices" in answer else answer

    async def until_healthy(self, wanted: bool) -> dict[str, Any]:
        """Returns what /health says of the histories then."""
        async with asyncio.timeout(60):
            while (histories := (await self.ask("GET", "/health"))["histories"])[
                "healthy"
            ] != wanted:
                await asyncio.sleep(0.01)
        return dict(histories)

    @property
    def answered(self) -> bool:
        """Whether the application has heard the end of every request that it has sent. It may come
        long after the engine has said it."""
        return not self.client._open

    @property
    def requests(self) -> list[Request]:
        return [message.request for message in self.loop.messages(Submit)]  # type: ignore[attr-defined]

    def logs(self) -> list[list[int]]:
        """Prompt and reply of every request so far."""
        return [[*request.prompt, *spell(request)] for request in self.requests]


@pytest.fixture
def serve(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """With the fixture `histories_at`, PostgreSQL stands for any file."""
    directory = save_merging(tmp_path)
    shared = (
        request.getfixturevalue("histories_at")
        if "histories_at" in request.fixturenames
        else ":memory:"
    )

    @contextlib.asynccontextmanager
    async def served(
        path: str | Path = ":memory:", keys: tuple[str, ...] = (), strict: bool = False, **loop: Any
    ) -> AsyncIterator[Served]:
        server = Served(directory, path if shared == ":memory:" else shared, keys, strict, **loop)
        try:
            async with server.http:
                yield server
        finally:
            server.loop.close()
            await server.closed.wait()
            server.loop.join()
            await server.histories.close()

    return served


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)
