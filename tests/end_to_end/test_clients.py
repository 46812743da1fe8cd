"""Packages that people have, as they are: each holds a streamed chat of three turns with the demo
model.

The first turn calls a tool, the second one tells of its result, the third one answers in JSON. The
demo model knows nothing of tools: the call is required, so a grammar makes it write one. Of the
second reply one word is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from .server import Server

LITELLM = Path(sys.prefix) / "litellm" / "bin" / "python"
"""litellm wants an older huggingface_hub and an older openai than our other packages: it has its
own environment."""

SYSTEM = (
    "You talk to {}. You are a friendly assistant, you answer in plain English, and you never make "
    "anything up."
)
QUESTION = "What is the weather in Oslo?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
RESULT = "It rains in Oslo."
FORECAST = {
    "title": "Forecast",
    "type": "object",
    "properties": {
        "umbrella": {"type": "boolean"},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
    },
    "required": ["umbrella", "degrees"],
    "additionalProperties": False,
}
AS_JSON = {
    "type": "json_schema",
    "json_schema": {"name": "forecast", "schema": FORECAST, "strict": True},
}
LAST = "Say it in JSON."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ("--gpu-kv-chunks", 200, "--host-kv-chunks", 200, "--max-model-len", 1024)
    with Server(tmp_path_factory.mktemp("state"), *options) as running:
        yield running


def check(call: dict[str, Any], text: str, forecast: dict[str, Any], cached: list[int]) -> None:
    """A tool's name and arguments, the second turn's text, the third one's object, tokens reused in
    each turn."""
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
    assert text
    assert isinstance(forecast["umbrella"], bool) and -50 <= forecast["degrees"] <= 50
    assert 0 == cached[0] < cached[1] <= cached[2]


def test_openai(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM.format("openai")},
        {"role": "user", "content": QUESTION},
    ]
    cached = []

    def turn(**overrides: Any) -> Any:
        options: dict[str, Any] = dict(
            model="demo", messages=messages, tools=[WEATHER], max_tokens=60, temperature=0
        )
        with client.chat.completions.stream(
            **options | overrides, stream_options={"include_usage": True}
        ) as stream:
            reply = stream.get_final_completion()
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        return reply.choices[0].message

    asks = turn(tool_choice="required")
    (call,) = asks.tool_calls
    messages += [asks.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    told = turn(stop=" ")
    messages += [told.to_dict(), {"role": "user", "content": LAST}]
    forecast = json.loads(turn(tool_choice="none", response_format=AS_JSON).content)
    check(
        {"name": call.function.name, "args": json.loads(call.function.arguments)},
        told.content,
        forecast,
        cached,
    )


def test_openai_conversations(server: Server) -> None:
    """One conversation for OpenAI's endpoints and for ours."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    items = client.conversations.items
    system: Any = {"role": "system", "content": SYSTEM.format("conversations")}
    created = client.conversations.create(items=[system], metadata={"topic": "tea"})

    def ask(question: str, conversation: str = created.id) -> tuple[str, int]:
        reply = client.responses.create(
            model="demo",
            input=question,
            conversation=conversation,
            max_output_tokens=40,
            temperature=0,
        )
        assert reply.usage is not None
        return reply.output[0].id or "", reply.usage.input_tokens_details.cached_tokens

    first, _ = ask("Tell me about tea.")
    second, _ = ask("And coffee?")
    listed = [item.id for item in items.list(created.id, order="asc", limit=1)]
    assert len(listed) == 5 and (listed[2], listed[4]) == (first, second)
    fork: Any = client.post(f"/conversations/{created.id}/fork", cast_to=object, body={})
    pinned: Any = client.post(f"/conversations/{created.id}/pin", cast_to=object)
    assert pinned["pinned_until"] and pinned["metadata"] == {"topic": "tea"}
    items.delete(listed[3] or "", conversation_id=created.id)
    _, cached = ask("What is bread?")
    _, forked = ask("What is bread?", fork["id"])
    assert 0 < cached < forked  # behind the deleted item nothing is reused
    assert [item.id for item in items.list(created.id, order="asc")][:4] == [*listed[:3], second]
    assert [item.id for item in items.list(fork["id"], order="asc")][:5] == listed
    for conversation in (created.id, fork["id"]):
        assert client.conversations.delete(conversation).deleted


def test_openai_hears_that_a_model_is_unknown(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": QUESTION}]
    for ask in (
        lambda: client.chat.completions.create(model="gpt-4o", messages=question),
        lambda: client.completions.create(model="gpt-4o", prompt="Hello"),
        lambda: client.responses.create(model="gpt-4o", input="Hello"),
        lambda: client.models.retrieve("gpt-4o"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_langchain(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    from langchain_core.messages import (
        AIMessageChunk,
        BaseMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
    from langchain_openai import ChatOpenAI

    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    settings: dict[str, Any] = dict(temperature=0, max_tokens=60, max_retries=0, stream_usage=True)
    model = ChatOpenAI(model="demo", base_url=f"{server.url}/v1", api_key="none", **settings)
    messages: list[BaseMessage] = [
        SystemMessage(SYSTEM.format("LangChain")),
        HumanMessage(QUESTION),
    ]
    cached = []

    def turn(speaker: Any) -> AIMessageChunk:
        first, *others = speaker.stream(messages)
        reply = sum(others, first)
        assert reply.usage_metadata is not None
        cached.append(reply.usage_metadata["input_token_details"]["cache_read"])
        return reply

    asks = turn(model.bind_tools([WEATHER], tool_choice="weather"))
    (call,) = asks.tool_calls
    messages += [asks, ToolMessage(RESULT, tool_call_id=call["id"])]
    told = turn(model.bind_tools([WEATHER], stop=" "))
    messages += [told, HumanMessage(LAST)]
    forecast = json.loads(turn(model.bind(response_format=AS_JSON)).text)
    check(dict(call), told.text, forecast, cached)
    *_, last = model.with_structured_output(FORECAST, method="json_schema").stream(messages)
    assert last == forecast


@pytest.mark.slow
@pytest.mark.skipif(
    not LITELLM.exists(), reason=f"no litellm in {LITELLM.parents[1]}: run `make litellm`"
)
def test_litellm(server: Server) -> None:
    script = Path(__file__).with_name("litellm_chat.py")
    begin = [
        {"role": "system", "content": SYSTEM.format("litellm")},
        {"role": "user", "content": QUESTION},
    ]
    request = dict(
        url=f"{server.url}/v1", begin=begin, tool=WEATHER, result=RESULT, last=LAST, form=AS_JSON
    )
    # the package's own prices: others it would fetch
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    answer = subprocess.run(
        [LITELLM, script, json.dumps(request)],
        capture_output=True,
        text=True,
        env=os.environ | local,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    check(**json.loads(answer.stdout.splitlines()[-1]))
