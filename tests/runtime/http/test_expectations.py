"""What clients of OpenAI's and vLLM's servers take for granted."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def test_the_root_leads_to_the_page_and_the_version_is_told(ask: Callable[..., Any]) -> None:
    async def look(http: httpx.AsyncClient) -> tuple[httpx.Response, Any, httpx.Response]:
        return await http.get("/", follow_redirects=True), (await http.get("/version")).json(), await http.post("/ping")

    page, told, ping = ask(look)
    assert page.is_success and page.url.path == "/ui" and page.headers["content-type"].startswith("text/html")
    assert told == {"version": version("pensieve")} and ping.status_code == 200
