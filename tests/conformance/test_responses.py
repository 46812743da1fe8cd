"""The behaviour that agents expect of the Responses API: tools, reasoning, formats."""

from __future__ import annotations

import json
from typing import Any

import openai

from .asked_server import Server, user

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
NAMED = {"type": "function", "name": "weather"}
FORCED: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": NAMED,
    "parallel_tool_calls": False,
    "max_output_tokens": 100,
}


def test_a_forced_function_is_called(server: Server) -> None:
    """One call, whose arguments follow the schema, for `required` and for a name."""
    for choice in ("required", NAMED):
        response = server.respond(**{**FORCED, "tool_choice": choice})
        (call,) = response.output
        assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
        assert call.call_id and json.loads(call.arguments)["city"] in ("Oslo", "Rome")


def test_a_streamed_call_is_put_together(server: Server) -> None:
    """The client's stream helper finds the call; its events come in the documented order."""
    ask = dict(model=server.model, input="The weather in Oslo?", **FORCED)
    with server.client.responses.stream(**ask) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        (call,) = stream.get_final_response().output
    assert set(json.loads(call.arguments)) == {"city"}
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_call_is_answered(server: Server) -> None:
    """The output and the result are sent back, or the result alone to a stored response: text
    follows, after an equal prompt."""
    first = server.respond("The weather in Oslo?", **FORCED)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    ask: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "none"}
    whole = server.respond([*user("The weather in Oslo?"), call, result], **ask)
    stored = server.respond([result], previous_response_id=first.id, **ask)
    assert whole.output_text and stored.output_text
    assert whole.usage.input_tokens == stored.usage.input_tokens > first.usage.input_tokens


def test_reasoning_of_earlier_replies_is_accepted(server: Server) -> None:
    """Agents send it back, also encrypted; an item that is not known is refused by its type."""
    thoughts = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "The user asks for tea."}],
        "encrypted_content": "Z",
    }
    answer = {"role": "assistant", "content": "Tea is hot."}
    items: list[Any] = [*user("Tea?"), thoughts, answer, *user("Go on.")]
    include = ["reasoning.encrypted_content"]
    assert server.respond(items, store=False, include=include).usage.output_tokens
    unknown = {"type": "no_such_item"}
    error = server.refuses(openai.BadRequestError, lambda: server.respond([*items, unknown]))
    assert "no_such_item" in error.message


def test_a_response_follows_a_schema(server: Server) -> None:
    """text.format, and tools that a server does not run do no harm."""
    schema = {"type": "json_schema", "name": "a", "schema": WEATHER["parameters"], "strict": True}
    response = server.respond(text={"format": schema}, max_output_tokens=100)
    assert json.loads(response.output_text)["city"] in ("Oslo", "Rome")
    assert server.respond(tools=[{"type": "web_search"}]).output_text
