"""The disk of the histories is full: no turn is computed for nothing, and deletions work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.runtime.conversations import turns

from ..conversations.full_disk import full_file
from ..served import CHAT, Served, run, serve
from .test_database_outages import refusing

__all__ = ["serve"]  # a fixture

CONVERSATIONS = "/v1/conversations"


@contextlib.contextmanager
def full(server: Served, postgres: str) -> Iterator[None]:
    """While it is open, its disk is full."""
    if server.store.shared:
        with refusing(postgres, "turns", "53100"):
            yield
    else:
        with full_file(Path(server.store.where)):
            yield


@pytest.mark.parametrize("kind", ["SQLite", "PostgreSQL"])
def test_a_turn_is_refused_before_it_is_computed_and_deletions_work(
    kind: str,
    serve: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "RECOVERY_S", 0.01)
    postgres = request.getfixturevalue("postgres") if kind == "PostgreSQL" else ""

    async def work() -> None:
        async with serve(postgres or tmp_path / "history.sqlite") as server:
            for name in "abc":
                await server.chat("hello", conversation=name)
            with full(server, postgres):
                messages = [{"role": "user", "content": "more"}]
                body = dict(messages=messages, conversation="a", history="server")
                error = (await server.post(CHAT, 507, **body))["error"]
                assert "cannot be written to" in error["message"]  # a limit of files: no ENOSPC
                health = await server.until_healthy(False)
                assert health["reason"] == error["message"]
                assert "pensieve:histories_healthy 0.0" in (await server.http.get("/metrics")).text
                computed = len(server.requests)
                assert computed == 4
                await server.post(CHAT, 507, **body)
                await server.post(CHAT, 507, messages=messages, conversation="new")
                await server.post("/v1/responses", 507, input="hello")
                await server.post("/v1/completions", 507, prompt="hello", conversation="b")
                assert len(server.requests) == computed, "before anything is computed"
                assert await server.chat("hello"), "what has no name needs no room"
                await server.post("/v1/responses", input="hello", store=False)
                assert len((await server.ask("GET", f"{CONVERSATIONS}/a"))["messages"]) == 2
                for name in "bc":
                    await server.ask("DELETE", f"{CONVERSATIONS}/{name}")
                    await server.ask("GET", f"{CONVERSATIONS}/{name}", 404)
                await server.post(CHAT, 507, **body)
            await server.until_healthy(True)
            assert "pensieve:histories_healthy 1.0" in (await server.http.get("/metrics")).text
            await server.post(CHAT, **body)
            assert len((await server.ask("GET", f"{CONVERSATIONS}/a"))["messages"]) == 4

    run(work())
