"""Messages and tools, as the chat template reads them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pensieve.runtime.frontend.chat_messages import Message, Tool
from pensieve.runtime.frontend.other_providers import result_texts
from pensieve.runtime.http.messages import AssistantMessage


def test_a_tool_reaches_the_template_as_it_was_sent() -> None:
    function = {"return": {"type": "string"}, "parameters": {"type": "object"}, "name": "look"}
    sent = {"function": function, "extra": 1, "type": "function"}
    tool = Tool.model_validate(sent).for_template()
    assert tool == sent
    assert list(tool) == list(sent)
    assert list(tool["function"]) == list(function)
    nulls = {"function": {**function, "strict": None}, "extra": 1, "type": "function", "x": None}
    assert Tool.model_validate(nulls).for_template() == sent


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template(name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = {"role": "assistant", "content": parts, name: "c"}
    assert Message.model_validate(sent).for_template() == sent


def test_thoughts_that_are_no_text_are_ignored() -> None:
    ignored: list[str] = []
    sent = {"role": "assistant", "content": "a", "reasoning": {"effort": "high"}}
    message = Message.model_validate(sent, context=ignored)
    assert message.for_template() == {"role": "assistant", "content": "a"}
    assert ignored == ["reasoning"]


def test_arguments_may_be_an_object_as_a_conversations_messages_have_them() -> None:
    texts = [
        Message.model_validate(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": arguments},
                    }
                ],
            }
        ).for_template()
        for arguments in ({"b": 1, "a": "é"}, '{"b": 1, "a": "é"}')
    ]
    assert texts[0] == texts[1]
    assert list(texts[0]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


def test_a_document_of_texts_in_a_tools_result_is_read() -> None:
    """Also its title and what it says of itself."""
    plain = {"type": "text", "data": "one", "media_type": "text/plain"}
    blocks = {"type": "content", "content": [{"type": "text", "text": "two"}]}
    parts = [
        {"type": "document", "source": plain, "title": "T", "context": "C"},
        {"type": "document", "source": blocks, "title": None},
        {"type": "document", "source": {"type": "base64", "data": "JVBE"}},
    ]
    ignored: list[str] = []
    texts = [part["text"] for part in result_texts(parts, "text", "tool", ignored)]
    assert texts == ["T\nC\none", "two", "[document left out: this model reads text only]"]
    assert ignored == ["tool.document"]


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    deep = '{"a":' * 300 + "1" + "}" * 300
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    with pytest.raises(ValidationError, match="must be a JSON object"):
        Message.model_validate({"role": "assistant", "tool_calls": [call]})


def test_thinking_blocks_are_thoughts() -> None:
    blocks = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "text", "text": "b"},
    ]
    (message,) = AssistantMessage.model_validate(
        {"role": "assistant", "content": blocks}
    ).messages()
    assert message.for_template() == {"role": "assistant", "content": "b", "reasoning_content": "a"}
