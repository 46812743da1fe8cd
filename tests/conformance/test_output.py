"""The behaviour that users of the OpenAI API expect of log probabilities, structured output and
tool calls."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

from .asked_server import Server, schema_format, texts, user

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 3, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)
    names: list[Literal["Tom", "Rex"]] = Field(max_length=2)


def test_chat_logprobs_describe_the_text(server: Server) -> None:
    """An entry for each token: bytes that join to the text, as many likeliest ones as requested, in
    order."""
    choice = server.chat(temperature=0, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert (
        b"".join(bytes(entry.bytes or ()) for entry in content).decode() == choice.message.content
    )
    for entry in content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and entry.logprob <= 0
        assert sum(map(math.exp, tops)) <= 1.001
        assert entry.top_logprobs[0].token == entry.token, "greedy: the likeliest one is said"


def test_streamed_logprobs_are_the_same(server: Server) -> None:
    """Those of all chunks are those of the whole answer."""
    ask: dict[str, Any] = dict(temperature=0, logprobs=True, top_logprobs=1)
    whole = server.chat(**ask).choices[0].logprobs.content
    parts = [
        choice.logprobs for chunk in server.chat(**ask, stream=True) for choice in chunk.choices
    ]
    streamed = [entry for part in parts if part is not None for entry in part.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert all(
        abs(one.logprob - other.logprob) < 0.01 for one, other in zip(streamed, whole, strict=True)
    )


def test_completion_logprobs_have_lists_of_equal_length(server: Server) -> None:
    """Tokens, their log probabilities, the likeliest ones and offsets into the text."""
    choice = server.complete(temperature=0, logprobs=2).choices[0]
    logprobs = choice.logprobs
    lists = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert len({len(values) for values in lists}) == 1 and len(logprobs.tokens) > 1
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset) and "".join(
        logprobs.tokens
    ).startswith(choice.text)


def test_a_json_schema_is_followed(server: Server) -> None:
    """With any sampling, the answer is JSON of the schema."""
    properties = {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    for seed in range(2):
        answer = server.chat(
            response_format=schema_format(schema), max_tokens=80, seed=seed
        ).choices[0]
        value = json.loads(answer.message.content)
        assert (
            answer.finish_reason == "stop"
            and value["city"] in ("Oslo", "Rome")
            and value["warm"] in (True, False)
        )


def test_the_client_parses_a_schema(server: Server) -> None:
    """`chat.completions.parse` gives an object of the pydantic model; its message can be sent
    back."""
    ask: dict[str, Any] = dict(model=server.model, response_format=Animal, max_tokens=120)
    message = (
        server.client.chat.completions.parse(messages=user("Describe an animal."), **ask)
        .choices[0]
        .message
    )
    assert isinstance(message.parsed, Animal)
    # with the fields that the client has added
    sent = message.model_dump(mode="json", warnings=False)
    again = [*user("Describe an animal."), sent, *user("Another one.")]
    assert (
        server.client.chat.completions.parse(messages=again, **ask).choices[0].message.parsed
        is not None
    )


def test_json_object_gives_an_object(server: Server) -> None:
    """The answer is a JSON object, or the beginning of one that the limit cut."""
    choice = server.chat(
        "Answer in JSON.", response_format={"type": "json_object"}, max_tokens=40
    ).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_schema_that_cannot_be_followed_is_refused(server: Server) -> None:
    """BadRequestError, not an answer of another form."""
    schema = schema_format({"type": "frob"})
    server.refuses(openai.BadRequestError, lambda: server.chat(response_format=schema))


def test_streamed_unicode_is_never_broken(server: Server) -> None:
    """Characters of several bytes and tokens come whole: each delta is proper text."""
    unicode_text = "Grüße, 日本語 🍵 Ελλάδα"
    chunks = list(
        server.chat(
            response_format=schema_format({"const": unicode_text}), max_tokens=120, stream=True
        )
    )
    assert json.loads(texts(chunks)[0]) == unicode_text
    assert not any(
        "\ufffd" in (choice.delta.content or "") for chunk in chunks for choice in chunk.choices
    )


def test_a_required_tool_is_called(server: Server) -> None:
    """finish_reason tool_calls, arguments that follow the schema, no content."""
    for choice in ("required", NAMED):
        answer = server.chat(
            tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=100
        ).choices[0]
        (call,) = answer.message.tool_calls
        assert (
            (call.type, call.function.name) == ("function", "weather")
            and call.id
            and not answer.message.content
        )
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        if choice == "required":
            assert answer.finish_reason == "tool_calls"


def test_a_tool_is_called_or_not_if_the_model_may_choose(server: Server) -> None:
    """auto: text or calls, as shown by the finish reason; none: text."""
    for choice in ("auto", "none"):
        answer = server.chat(tools=[WEATHER], tool_choice=choice).choices[0]
        assert (answer.finish_reason == "tool_calls") == bool(answer.message.tool_calls)
        assert answer.message.tool_calls or answer.message.content
    assert not answer.message.tool_calls


def test_a_streamed_tool_call_is_put_together(server: Server) -> None:
    """The client's own stream helper finds the call."""
    ask: dict[str, Any] = dict(
        model=server.model,
        messages=user("The weather in Oslo?"),
        tools=[WEATHER],
        tool_choice=NAMED,
    )
    with server.client.chat.completions.stream(**ask, max_tokens=100) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_a_tool_result_is_answered(server: Server) -> None:
    """The message with the calls is sent back unchanged, with results after it, and text
    follows."""
    question = user("The weather in Oslo?")
    ask: dict[str, Any] = dict(tools=[WEATHER], parallel_tool_calls=False)
    message = (
        server.chat(messages=question, tool_choice="required", max_tokens=100, **ask)
        .choices[0]
        .message
    )
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    answer = server.chat(messages=[*question, message, *results], tool_choice="none", **ask)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
