"""Messages and tools, as the chat template reads them."""

from __future__ import annotations

import pytest

from pensieve.runtime.frontend.chat_messages import Message, Tool
from pensieve.runtime.http.messages import AssistantMessage


def test_a_tool_reaches_the_template_as_it_was_sent() -> None:
    function = {"return": {"type": "string"}, "parameters": {"type": "object"}, "name": "look"}
    sent = {"function": function, "strict": None, "type": "function"}
    tool = Tool.model_validate(sent).for_template()
    assert tool == sent
    assert list(tool) == list(sent)
    assert list(tool["function"]) == list(function)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template(name: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = {"role": "assistant", "content": parts, name: "c"}
    assert Message.model_validate(sent).for_template() == sent


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
