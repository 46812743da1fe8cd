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


LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("path", LIMITS)
def test_fewest_tokens_above_the_most_are_refused_with_the_reason(serve: Any, path: str) -> None:
    """The fixture's generation_config.json has max_new_tokens 12."""

    async def ask() -> None:
        async with serve() as server:
            await server.post(path, **BODIES[path], min_tokens=12)
            for limit, min_tokens, words in (
                ({}, 13, "min_tokens is 13, and a reply of this server has at most 12 tokens"),
                ({LIMITS[path]: 20}, 13, "min_tokens is 13, and a reply of this server has at"),
                ({LIMITS[path]: 5}, 6, f"min_tokens is 6, and {LIMITS[path]} is 5"),
                ({}, -1, "min_tokens must be between 0 and"),
            ):
                body = {**BODIES[path], **limit, "min_tokens": min_tokens}
                error = (await server.post(path, 400, **body))["error"]
                assert error["param"] == "min_tokens" and words in error["message"]

    run(ask())


def test_fewest_tokens_above_the_default_limit_say_which_field_to_set(serve: Any) -> None:
    async def ask() -> None:
        async with serve() as server:
            refused = await server.post("/v1/completions", 400, prompt="hi", min_tokens=17)
            words = "min_tokens is 17, and max_tokens is 16"
            assert refused["error"]["message"] == words

    run(ask())
