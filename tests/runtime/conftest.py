"""The application in this process, before a loop played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pensieve.runtime.conversations import databases
from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.http.app import create_app
from pensieve.runtime.http.settings import DEFAULTS, HTTPSettings
from pensieve.runtime.text.tokenizer import Tokenizer

from .fake_loop import FakeLoop, ready, save_tokenizer


@pytest.fixture(autouse=True)
def a_small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the many files of histories, whose directories are kept for a while."""
    monkeypatch.setattr(databases, "RESERVE_BYTES", 2**16)


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@contextlib.asynccontextmanager
async def served(
    loop: FakeLoop, directory: Path | None, settings: HTTPSettings = DEFAULTS
) -> AsyncIterator[httpx.AsyncClient]:
    """The application in this process, without sockets."""
    client = EngineClient(loop.client_end)
    tokenizer = Tokenizer.load(directory, settings.chat_template) if directory is not None else None
    transport = httpx.ASGITransport(
        create_app(client, ready(str(directory or "")), tokenizer, settings)
    )
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http
    finally:
        loop.close()
        await client.closed.wait()
        loop.join()


@pytest.fixture
def ask(tokenizer_directory: Path) -> Callable[..., Any]:
    """Runs a coroutine function over a client of a fresh application: ask(work, loop)."""

    def run(
        work: Callable[[httpx.AsyncClient], Awaitable[Any]],
        loop: FakeLoop | None = None,
        directory: Path | None = tokenizer_directory,
        settings: HTTPSettings = DEFAULTS,
    ) -> Any:
        async def main() -> Any:
            async with served(loop or FakeLoop(), directory, settings) as http:
                return await work(http)

        return asyncio.run(main())

    return run
