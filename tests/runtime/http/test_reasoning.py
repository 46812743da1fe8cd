"""Thoughts of replies: apart from the content in the answers of all APIs, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.bodies import ChatBody
from pensieve.runtime.http.response_items import encoded_thought
from pensieve.runtime.http.responses import ResponseBody
from pensieve.runtime.http.settings import HTTPSettings

from ..fake_loop import EOS, FakeLoop, byte_tokens

THOUGHT, CONTENT = "The user greets.", "Hello!"
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{CONTENT}"
TOLD = [{"role": "user", "content": "hello"}]
THINKS = HTTPSettings(reasoning_parser="deepseek_r1")
Ask = Callable[..., Any]


def events(text: str) -> list[dict[str, Any]]:
    lines = (line for line in text.splitlines() if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def answered(ask: Ask, path: str, settings: HTTPSettings = THINKS, **body: Any) -> httpx.Response:
    loop = FakeLoop(lambda _: [*byte_tokens(REPLY), EOS])

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(path, json={"model": "fake", **body})

    response: httpx.Response = ask(work, loop, settings=settings)
    assert response.status_code == 200, response.text
    return response


def test_a_chat_has_its_thought_beside_its_content(ask: Ask) -> None:
    answer = answered(ask, "/v1/chat/completions", messages=TOLD).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == (THOUGHT, THOUGHT)
    assert message["content"] == CONTENT
    thinking = len(REPLY) - len(CONTENT)
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(THOUGHT) <= counted <= thinking


def test_a_streamed_chat_has_the_same(ask: Ask) -> None:
    response = answered(ask, "/v1/chat/completions", messages=TOLD, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events(response.text)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == CONTENT


def test_a_message_has_a_block_of_thoughts(ask: Ask) -> None:
    body = {"messages": TOLD, "max_tokens": 100}
    blocks = answered(ask, "/v1/messages", **body).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (THOUGHT, CONTENT)
    streamed = events(answered(ask, "/v1/messages", stream=True, **body).text)
    started = [event["content_block"]["type"] for event in streamed if "content_block" in event]
    assert started == ["thinking", "text"]
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == CONTENT


def test_a_block_of_thoughts_is_signed(ask: Ask) -> None:
    """Pydantic AI and pi send a thought with an empty signature back as text of the dialogue."""
    body = {"messages": TOLD, "max_tokens": 100}
    signature = answered(ask, "/v1/messages", **body).json()["content"][0]["signature"]
    assert signature
    streamed = events(answered(ask, "/v1/messages", stream=True, **body).text)
    deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
    assert [delta["signature"] for delta in deltas if "signature" in delta] == [signature]
    started = next(event["content_block"] for event in streamed if "content_block" in event)
    assert started["signature"] == ""


def test_a_response_has_an_item_of_thoughts(ask: Ask) -> None:
    output = answered(ask, "/v1/responses", input="hello").json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"][0]["text"] == THOUGHT
    assert output[1]["content"][0]["text"] == CONTENT
    assert "encrypted_content" not in output[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("included", [False, True])
def test_a_thought_comes_back_in_its_encrypted_content(
    ask: Ask, stream: bool, included: bool
) -> None:
    """With `store: false` the AI SDK sends nothing else of a thought back, as opencode does.
    LangChain's client does not ask for it."""
    asks = {"include": ["reasoning.encrypted_content"]} if included else {"store": False}
    answer = answered(ask, "/v1/responses", input="hello", stream=stream, **asks)
    if stream:
        last = [event for event in events(answer.text) if event["type"].endswith("item.done")]
        thought = last[0]["item"]
        assert events(answer.text)[-1]["response"]["output"][0] == thought
    else:
        thought = answer.json()["output"][0]
    assert thought["content"][0]["text"] == THOUGHT
    kept = {name: thought[name] for name in ("type", "id", "encrypted_content")}
    for sent in (
        {**kept, "summary": []},
        {**kept, "summary": [{"type": "summary_text", "text": "Greets."}]},
        {**thought, "encrypted_content": None},
    ):
        (item,) = ResponseBody.model_validate({"input": [sent]}).input
        assert item.text == THOUGHT  # type: ignore[union-attr]


@pytest.mark.parametrize("effort", ["auto", "concise", "detailed"])
def test_a_client_that_asks_for_a_summary_gets_the_thoughts_as_one(ask: Ask, effort: str) -> None:
    """The AI SDK reads nothing else."""
    body = {"input": "hello", "reasoning": {"summary": effort}}
    answer = answered(ask, "/v1/responses", **body).json()
    assert answer["reasoning"]["summary"] == effort
    thought = answer["output"][0]
    assert thought["content"] == []
    assert thought["summary"] == [{"type": "summary_text", "text": THOUGHT}]
    (item,) = ResponseBody.model_validate({"input": [thought]}).input
    assert item.text == THOUGHT  # type: ignore[union-attr]
    streamed = events(answered(ask, "/v1/responses", stream=True, **body).text)
    about = [event for event in streamed if event["type"].startswith("response.reasoning_summary")]
    assert {event["summary_index"] for event in about} == {0}
    names = [event["type"].removeprefix("response.reasoning_summary_") for event in about]
    deltas = len(about) - 3
    assert names == ["part.added", *["text.delta"] * deltas, "text.done", "part.done"]
    assert "".join(event.get("delta", "") for event in about) == THOUGHT
    assert not any("reasoning_text" in event["type"] for event in streamed)
    assert streamed[-1]["response"]["output"][0]["summary"] == thought["summary"]


@pytest.mark.parametrize("foreign", ["Z", "gAAAAABo", "cGVuc2lldmU=", "pensieve:cGV", None])
def test_encrypted_content_that_is_not_ours_is_not_read(foreign: str | None) -> None:
    """Also if it was ours and is damaged: the client would send it in each later turn."""
    summary = [{"type": "summary_text", "text": "Greets."}]
    sent = {"type": "reasoning", "summary": summary, "encrypted_content": foreign}
    (item,) = ResponseBody.model_validate({"input": [sent]}).input
    assert item.text == "Greets."  # type: ignore[union-attr]


def test_an_empty_content_hides_no_thought() -> None:
    empty = [{"type": "reasoning_text", "text": ""}]
    sent = {"type": "reasoning", "content": empty, "encrypted_content": encoded_thought(THOUGHT)}
    (item,) = ResponseBody.model_validate({"input": [sent]}).input
    assert item.text == THOUGHT  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_that_its_usage_counts_thoughts(ask: Ask, stream: bool) -> None:
    """Else Codex adds an estimate of each earlier thought, and compacts its history too early."""
    headers = answered(ask, "/v1/responses", input="hello", stream=stream).headers
    assert headers["x-reasoning-included"] == "true" and headers["x-request-id"]


def test_a_client_may_leave_thoughts_out(ask: Ask) -> None:
    body = {"messages": TOLD, "include_reasoning": False}
    message = answered(ask, "/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["content"] == CONTENT and "reasoning" not in message


def test_without_a_form_the_text_stays_whole(ask: Ask) -> None:
    answer = answered(ask, "/v1/chat/completions", HTTPSettings(), messages=TOLD).json()
    assert answer["choices"][0]["message"]["content"] == REPLY


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"reasoning_effort": "none"},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"},
        ),
    ],
)
def test_thoughts_are_switched_by_the_template(fields: Any, variables: Any) -> None:
    body = ChatBody.model_validate({"messages": TOLD, **fields})
    assert body.generate().template_variables == variables


def test_a_budget_that_cannot_be_kept_is_named(ask: Ask) -> None:
    for fields, name in (
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ):
        response = answered(ask, "/v1/chat/completions", messages=TOLD, **fields)
        assert response.headers["x-pensieve-ignored-fields"] == name
