"""The render endpoints, which routers ask for a prompt's tokens, over a simulated loop."""

from __future__ import annotations

from typing import Any

import pytest

from ..served import run, serve

__all__ = ["serve"]  # a fixture

DIALOGUE = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "more"},
]
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "hello world"}, {"prompt": [5, 6, 7]}],
    "/v1/chat/completions": [
        {"messages": DIALOGUE},
        {"messages": DIALOGUE, "conversation": "tea", "stream": True, "max_tokens": 5},
        {"messages": DIALOGUE, "tools": [{"type": "function", "function": TOOL}]},
        {"messages": DIALOGUE[:2], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": DIALOGUE, "add_generation_prompt": False},
    ],
    "/v1/messages": [
        {"messages": DIALOGUE, "max_tokens": 9},
        {"messages": DIALOGUE, "max_tokens": 9, "system": "Be brief.", "tools": [ANTHROPIC_TOOL]},
        {
            "messages": DIALOGUE,
            "max_tokens": 9,
            "system": "<total_tokens>5 tokens left</total_tokens>",
        },
    ],
}
CASES = [(path, body) for path, bodies in BODIES.items() for body in bodies]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_rendered_prompt_is_the_one_that_a_reply_is_made_to(
    serve: Any, path: str, body: dict[str, Any]
) -> None:
    async def work() -> None:
        async with serve() as server:
            rendered = await server.post(f"{path}/render", model="fake", **body)
            assert server.requests == []
            response = await server.http.post(path, json={"model": "fake", **body})
            assert response.is_success
            if path == "/v1/completions":
                (rendered,) = rendered
            tokens = server.requests[0].prompt.tolist()
            assert rendered == {"model": "fake", "token_ids": tokens}

    run(work())


def test_each_prompt_of_a_completion_is_rendered(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            prompts = ["hello", [5, 6]]
            first, second = [
                (await server.post("/v1/completions/render", prompt=prompt))[0]["token_ids"]
                for prompt in prompts
            ]
            many = await server.post("/v1/completions/render", prompt=["hello", "hello"])
            assert [one["token_ids"] for one in many] == [first, first]
            assert second == [5, 6]

    run(work())


def test_a_prompt_of_the_servers_history_is_refused_and_nothing_is_stored(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            body = {"messages": DIALOGUE[:1], "conversation": "tea"}
            await server.post("/v1/chat/completions/render", **body)
            assert (await server.http.get("/v1/conversations/tea")).status_code == 404
            for path, prompt in (
                ("/v1/chat/completions", {"messages": DIALOGUE[:1]}),
                ("/v1/completions", {"prompt": "more"}),
            ):
                refused = await server.post(
                    f"{path}/render", 400, conversation="tea", history="server", **prompt
                )
                assert "send all messages" in refused["error"]["message"]

    run(work())
