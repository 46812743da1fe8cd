"""The output options of replies, with a real server of the demo engine and the official client."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from .server import Server

USER = [{"role": "user", "content": "Tell me about tea."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"enum": [1, 3, 7]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--gpu-kv-chunks", 200, "--host-kv-chunks", 200, "--max-model-len", 1024)
    with Server(tmp_path_factory.mktemp("state"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_logprobs_whole_and_streamed(client):
    ask = dict(
        model="demo", messages=USER, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = client.chat.completions.create(**ask).choices[0]
    content = choice.logprobs.content
    assert (
        b"".join(bytes(entry.bytes or b"") for entry in content).decode() == choice.message.content
    )
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
    streamed = [
        entry
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in content], abs=1e-3
    )


def test_completion_logprobs_and_echo(client):
    prompt = (
        "Tea is a drink that people make with hot water and leaves, and some like it with milk."
    )
    ask = dict(model="demo", prompt=prompt, max_tokens=5, temperature=0, logprobs=2)
    plain, echo = (client.completions.create(**ask, echo=echo).choices[0] for echo in (False, True))
    assert echo.text == prompt + plain.text
    assert echo.logprobs.tokens[-len(plain.logprobs.tokens) :] == plain.logprobs.tokens
    assert "".join(echo.logprobs.tokens).startswith(prompt)
    for logprobs, text in ((plain.logprobs, plain.text), (echo.logprobs, echo.text)):
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert text[offset:].startswith(token) or token.startswith("<")
    assert echo.logprobs.token_logprobs[0] is None and all(
        value <= 0 for value in echo.logprobs.token_logprobs[1:]
    )


def test_prompt_logprobs_do_not_depend_on_the_cache(client):
    ask = dict(
        model="demo", prompt=list(range(40, 140)), max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    cold, cached = (client.completions.create(**ask) for _ in range(2))
    first, second = (answer.choices[0].prompt_logprobs for answer in (cold, cached))
    assert first[0] is None and len(first) == len(second) == 100
    assert (
        cold.usage.prompt_tokens_details.cached_tokens
        == cached.usage.prompt_tokens_details.cached_tokens
        == 0
    )
    for token, left, right in zip(range(41, 140), first[1:], second[1:], strict=True):
        assert left[str(token)]["logprob"] == pytest.approx(right[str(token)]["logprob"], abs=1e-3)


def test_choices(client, server):
    before = server.metric('pensieve:prompt_tokens_total{source="new"}')
    ask = dict(model="demo", prompt=list(range(150, 250)), max_tokens=12, n=4)
    seeded = client.completions.create(**ask, seed=3)
    assert seeded.usage.prompt_tokens == 100
    assert server.metric('pensieve:prompt_tokens_total{source="new"}') == before + 100
    assert len({choice.text for choice in seeded.choices}) == 4
    again = client.completions.create(**ask, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in seeded.choices]
    assert again.usage.prompt_tokens_details.cached_tokens >= 96
    texts = [""] * 4
    for chunk in client.completions.create(**ask, temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert len(set(texts)) == 1


def test_biases_and_penalties(client):
    ask = dict(model="demo", prompt=[60, 61, 62], max_tokens=8, temperature=0)
    ids = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    forced = client.completions.create(**ask, logit_bias={"70": 100}, **ids).choices[0]
    assert forced.token_ids == [70] * 8
    varied = client.completions.create(
        **ask, logit_bias={"70": 10}, frequency_penalty=2.0, **ids
    ).choices[0]
    assert varied.token_ids != forced.token_ids


class Owner(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: list[Literal["left", "right"]] = Field(max_length=4)
    weight: float = Field(ge=0, le=99)
    owner: Owner | None


def test_the_clients_own_parsing_of_a_schema(client):
    """Sampled, so that a grammar is needed; limits keep a reply short."""
    for seed in range(4):
        ask = dict(model="demo", messages=USER, seed=seed, max_tokens=400, response_format=Animal)
        message = client.chat.completions.parse(**ask).choices[0].message
        assert isinstance(message.parsed, Animal)


def test_a_streamed_schema(client):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5}
    form = {"type": "json_schema", "json_schema": {"name": "flags", "schema": schema}}
    chunks = client.chat.completions.create(
        model="demo", messages=USER, max_tokens=100, seed=1, response_format=form, stream=True
    )
    flags = json.loads(
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    )
    assert 2 <= len(flags) <= 5 and set(map(type, flags)) == {bool}


def test_what_cannot_be_followed_is_a_bad_request(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frob"}}}
    with pytest.raises(
        openai.BadRequestError, match="response_format has a JSON schema that cannot"
    ):
        client.chat.completions.create(model="demo", messages=USER, response_format=form)


def test_tools_there_and_back(client):
    ask = dict(model="demo", tools=[WEATHER], max_tokens=300, seed=5)
    choice = client.chat.completions.create(messages=USER, tool_choice="required", **ask).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    results = []
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert (
            call.function.name == "weather"
            and len(arguments["city"]) <= 12
            and arguments["days"] in (1, 3, 7)
        )
        results.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    answer = client.chat.completions.create(
        messages=[*USER, choice.message, *results], tool_choice="none", **ask
    )
    assert answer.choices[0].message.tool_calls is None


def test_a_named_tool_streamed(client):
    named = {"type": "function", "function": {"name": "weather"}}
    ask = dict(model="demo", messages=USER, tools=[WEATHER], tool_choice=named, max_tokens=300)
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {
        "city",
        "days",
    }
