"""The behaviour that users of the Anthropic API, and agents that use it, expect of a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anthropic

from .asked_server import Server, user

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
KEPT = {"cache_control": {"type": "ephemeral"}}
GREEDY = {"extra_body": {"temperature": 0}}  # newer clients have no argument of this name
SYSTEM = [{"type": "text", "text": "You are an agent. " * 20, **KEPT}]


def prompt_tokens(message: Any) -> int:
    """All of them, cached or not."""
    usage = message.usage
    return int(
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def results(message: Any) -> list[dict[str, Any]]:
    """A result for each tool use in the message."""
    uses = [block for block in message.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"} for use in uses]


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_whole(server: Server) -> None:
    """It has the documented type, text, a stop reason, and usage."""
    message = server.message(max_tokens=100, **GREEDY)
    assert (message.type, message.role, message.model) == (
        "message",
        "assistant",
        server.model,
    ) and message.id
    assert [block.type for block in message.content] == ["text"] and text(message)
    assert message.stop_reason in ("end_turn", "max_tokens") and message.stop_sequence is None
    assert prompt_tokens(message) > 0 and 0 < message.usage.output_tokens <= 100


def test_a_streamed_message_is_the_same(server: Server) -> None:
    """Its events come in the documented order, and its text is that of the whole message."""
    whole = server.message(max_tokens=30, **GREEDY)
    events = list(server.message(max_tokens=30, **GREEDY, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    streamed = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert streamed == text(whole)
    last = events[kinds.index("message_delta") - len(kinds)]
    assert (
        last.delta.stop_reason == whole.stop_reason
        and last.usage.output_tokens == whole.usage.output_tokens
    )


def test_max_tokens_ends_a_message(server: Server) -> None:
    """stop_reason max_tokens, and no token more."""
    message = server.message(max_tokens=2)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_a_stop_sequence_ends_a_message(server: Server) -> None:
    """It is named, and is not part of the text."""
    whole = text(server.message(max_tokens=30, **GREEDY))
    stop = whole.split()[2]
    message = server.message(max_tokens=30, **GREEDY, stop_sequences=[stop, "\0 never"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text(message) == whole[: whole.index(stop)]


def test_tokens_are_counted_as_a_message_has_them(server: Server) -> None:
    """count_tokens equals the prompt's tokens in usage."""
    ask: dict[str, Any] = dict(system=SYSTEM, messages=user("Tell me about tea."), tools=[WEATHER])
    counted = server.anthropic.messages.count_tokens(model=server.model, **ask)
    assert counted.input_tokens == prompt_tokens(server.message(**ask))


def test_a_forced_tool_is_used(server: Server) -> None:
    """One use, whose input follows the schema."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        choice = {**choice, "disable_parallel_tool_use": True}
        message = server.message(tools=[WEATHER], tool_choice=choice, max_tokens=100)
        (use,) = message.content
        assert (use.type, use.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert use.input["city"] in ("Oslo", "Rome") and use.input["days"] in (1, 3, 7)


def test_a_streamed_chat_of_three_turns_with_tools(server: Server) -> None:
    """A tool is used, its result is answered, and a question follows. Turns find earlier ones in
    the cache."""
    ask: dict[str, Any] = dict(model=server.model, system=SYSTEM, tools=[WEATHER], max_tokens=100)
    messages = user("The weather in Oslo?")
    replies: list[Any] = []
    forced = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    for choice, follow_up in (
        (forced, results),
        ({"type": "none"}, lambda _: "And tomorrow?"),
        ({"type": "none"}, None),
    ):
        with server.anthropic.messages.stream(
            messages=messages, tool_choice=choice, **ask
        ) as stream:
            kinds = {event.type for event in stream}
            replies.append(stream.get_final_message())
        assert "message_stop" in kinds
        messages.append({"role": "assistant", "content": replies[-1].content})
        if follow_up is not None:
            messages += user(follow_up(replies[-1]))
    (use,) = replies[0].content
    assert set(use.input) == {"city", "days"} and replies[0].stop_reason == "tool_use"
    assert all(text(reply) for reply in replies[1:])
    prompts = [prompt_tokens(reply) for reply in replies]
    assert prompts == sorted(set(prompts))
    assert replies[2].usage.cache_read_input_tokens > 0


def test_a_streamed_message_follows_a_schema(server: Server) -> None:
    """output_config.format, in the second turn of a chat."""
    schema = {
        "type": "object",
        "properties": WEATHER["input_schema"]["properties"],
        "required": ["city", "days"],
    }
    wanted = {
        "format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    }
    messages = user("The weather in Oslo?")
    messages += [
        {"role": "assistant", "content": text(server.message(messages=messages))},
        *user("As JSON?"),
    ]
    ask: dict[str, Any] = dict(model=server.model, messages=messages, max_tokens=100)
    with server.anthropic.messages.stream(**ask, extra_body={"output_config": wanted}) as stream:
        message = stream.get_final_message()
    answer = json.loads(text(message))
    assert answer["city"] in ("Oslo", "Rome") and answer["days"] in (1, 3, 7) and len(answer) == 2


def test_thinking_of_earlier_replies_is_accepted(server: Server) -> None:
    """Agents send it back unchanged, also before a tool's result, as the only block, and in what is
    counted."""
    thinking = {
        "type": "thinking",
        "thinking": "The user asks for weather.",
        "signature": "c2lnbmVk",
    }
    redacted = {"type": "redacted_thinking", "data": "ZW5jcnlwdGVk"}
    use = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "weather",
        "input": {"city": "Oslo", "days": 1},
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
    messages = [
        *user("The weather in Oslo?"),
        {
            "role": "assistant",
            "content": [thinking, redacted, {"type": "text", "text": "I look."}, use],
        },
        *user([result]),
        {"role": "assistant", "content": [redacted]},
        *user("And tomorrow?"),
    ]
    ask: dict[str, Any] = dict(model=server.model, messages=messages, tools=[WEATHER])
    counted = server.anthropic.messages.count_tokens(**ask).input_tokens
    ask |= {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = server.anthropic.messages.create(**ask)
    betas = ["interleaved-thinking-2025-05-14"]
    with server.anthropic.beta.messages.stream(**ask, betas=betas) as stream:
        streamed = stream.get_final_message()
    assert prompt_tokens(whole) == prompt_tokens(streamed) == counted > 0


def test_what_claude_code_sends_is_understood(server: Server) -> None:
    """Fields that agents send beside the documented ones do no harm."""
    reminders: Sequence[dict[str, Any]] = [
        {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
        {
            "type": "text",
            "text": "Tell me about tea.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ]
    body = {
        "model": server.model,
        "max_tokens": 64,
        "system": SYSTEM,
        "messages": user(reminders),
        "tools": [{**WEATHER, "eager_input_streaming": True}],
        "metadata": {
            "user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"})
        },
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
    }
    status, answer = server.raw("/v1/messages?beta=true", json.dumps(body).encode())
    if status == 404 and "not_found_error" not in answer:
        server.skip("the server has no /v1/messages")
    assert status == 200, answer
    assert json.loads(answer)["type"] == "message"


def test_an_unknown_model_is_not_found(server: Server) -> None:
    """NotFoundError, for a message and for a count."""
    messages = server.anthropic.messages
    ask = dict(model="no-such-model", messages=user("x"))
    for error in (
        server.refuses(anthropic.NotFoundError, lambda: messages.create(**ask, max_tokens=5)),
        server.refuses(anthropic.NotFoundError, lambda: messages.count_tokens(**ask)),
    ):
        assert error.body["error"]["type"] == "not_found_error"


def test_another_key_is_refused(server: Server) -> None:
    """AuthenticationError, where the server wants a key; it takes one as Bearer too."""
    if server.api_key == "none":
        server.skip("no --api-key is given")
    other = server.anthropic.with_options(api_key="another")
    error = server.refuses(
        anthropic.AuthenticationError,
        lambda: other.messages.create(model=server.model, messages=user("x"), max_tokens=5),
    )
    assert error.body["error"]["type"] == "authentication_error"
    assert server.raw("/v1/messages", b"{}")[0] == 400  # sent with Bearer


def test_a_bad_request_is_refused(server: Server) -> None:
    """BadRequestError that names the fault."""
    for wrong in (
        {"max_tokens": -1},
        {"messages": []},
        {"tool_choice": {"type": "tool", "name": "none"}},
    ):
        error = server.refuses(
            anthropic.BadRequestError, lambda wrong=wrong: server.message(**wrong)
        )
        assert error.body["error"]["type"] == "invalid_request_error"
        assert next(iter(wrong)) in error.body["error"]["message"]
