"""A request's own sampling fields win over the server's defaults, on every endpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pensieve.runtime.messages import SamplingDefaults
from tests.runtime import served
from tests.runtime.served import run, serve

__all__ = ["serve"]

DIALOGUE = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": DIALOGUE},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "fake", "messages": DIALOGUE, "max_tokens": 500},
}


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = served.odd_ready()
    sampling = SamplingDefaults(0.5, 0.75, 7, 0.25, 1.5, 12)
    monkeypatch.setattr(served, "odd_ready", lambda: replace(ready, sampling=sampling))


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("path", BODIES)
def test_own_fields_win_over_the_defaults(serve: Any, path: str) -> None:
    async def ask() -> None:
        async with serve() as server:
            await server.post(path, **BODIES[path])
            await server.post(path, **BODIES[path], temperature=None)
            await server.post(path, **BODIES[path], temperature=0, top_k=-1, top_p=1)
            first, null, own = server.requests
            for request in (first, null):
                sampling = request.sampling
                assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 7)
                assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
                assert request.max_tokens == 12
            sampling = own.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
            assert sampling.repetition_penalty == 1.5

    run(ask())
