"""The input items of OpenAI's Responses API.

Items become messages as chat templates read them. The items of one reply (reasoning, a message,
calls) become one message of the assistant.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.body_base import Body, NonEmpty, leave_out
from ..frontend.chat_messages import (
    MOST_MESSAGES,
    Message,
    MessageFunctionCall,
    MessageToolCall,
    TextPart,
    text_only,
)
from ..frontend.other_providers import CALL_ITEMS, read_call, result_texts

LEFT_OUT = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_trigger",
        "configuration_update",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of tools that OpenAI's servers run, whose result the model's own messages behind them tell,
and items that say nothing to another model."""

CUSTOM_INPUT = "input"
"""The argument of the function that stands for a custom tool."""

RESPONSE_ID = "resp_"
ITEM_IDS = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
}
"""How the ids of items begin, by their types."""
_ITEM_ID = re.compile(rf"(?:{'|'.join(ITEM_IDS.values())})([0-9a-f]{{32}})_[0-9]{{1,9}}")


def item_id(kind: str, response: str, number: int) -> str:
    """The id of an item. It names its response, so that a stored item is found by its id alone; in
    a conversation, `response` is the hexadecimal name of the dialogue up to the item."""
    return f"{ITEM_IDS[kind]}{response.removeprefix(RESPONSE_ID)}_{number}"


def response_of(item: str) -> str | None:
    """The id of the response to which the item of this id belongs; None: of none."""
    written = _ITEM_ID.fullmatch(item)
    return None if written is None else RESPONSE_ID + written[1]


def place_id(place: int) -> str:
    """The id of a call that came without one, by its place among the items."""
    return f"item_{place}"


def is_place_id(id: str) -> bool:
    return re.fullmatch("item_[0-9]{1,9}", id) is not None


def full_name(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool."""
    return name if namespace is None else f"{namespace}__{name}"


class Part(Body):
    """A text in a message or in a tool's output."""

    IGNORED = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """The text of a reply that refuses to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _parts(content: Any) -> Any:
    """A text alone becomes one part. Raises RequestError for other parts than texts."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return text_only(content, "input_text", "output_text", "refusal")


Parts = list[Annotated[Part | RefusalPart, Field(discriminator="type")]]
Content = Annotated[Parts, BeforeValidator(_parts, json_schema_input_type=str | Parts)]


def _for_chat(parts: Parts) -> str | list[TextPart]:
    """Templates that read parts get several as they are."""
    texts = [TextPart(type="text", text=part.text) for part in parts]
    return texts if len(texts) > 1 else "".join(part.text for part in texts)


class MessageItem(Body):
    """A message, written by a client or sent back from a response."""

    IGNORED = frozenset({"id", "phase", "status"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


OWN_THOUGHT = "pensieve:"
"""How an `encrypted_content` of this server begins."""


def encoded_thought(thought: str) -> str:
    """Returns the `encrypted_content` of a thought, for clients that send nothing else of it back.
    It is no secret: the item has the text too."""
    return OWN_THOUGHT + base64.b64encode(thought.encode()).decode()


def decoded_thought(encoded: str) -> str:
    """The inverse of `encoded_thought`; "" for what another provider has encrypted, or a client
    has damaged: it would come in each later turn, and end the session."""
    if not encoded.startswith(OWN_THOUGHT):
        return ""
    try:
        return base64.b64decode(encoded.removeprefix(OWN_THOUGHT), validate=True).decode()
    except ValueError:
        return ""


class ReasoningItem(Body):
    """Thoughts of an earlier reply: `content`, or where the client has only that,
    `encrypted_content` or `summary`."""

    IGNORED = frozenset({"id", "status"})

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        if content := "".join(part.text for part in self.content):
            return content
        if thought := decoded_thought(self.encrypted_content or ""):
            return thought
        return "\n\n".join(part.text for part in self.summary)


class FunctionCallItem(MessageFunctionCall):
    """A call of an earlier reply."""

    IGNORED = frozenset({"async", "caller", "id", "parsed_arguments", "status"})

    type: Literal["function_call"]
    call_id: NonEmpty
    namespace: NonEmpty | None = None

    def call(self) -> MessageToolCall:
        """The call in the form of chats."""
        name = full_name(self.namespace, self.name)
        function = MessageFunctionCall(name=name, arguments=self.arguments)
        return MessageToolCall(id=self.call_id, function=function)


class CustomCallItem(Body):
    """A call of a custom tool in an earlier reply."""

    IGNORED = frozenset({"async", "caller", "id", "status"})

    type: Literal["custom_tool_call"]
    call_id: NonEmpty
    name: NonEmpty
    namespace: NonEmpty | None = None
    input: str

    def call(self) -> MessageToolCall:
        """See `FunctionCallItem`."""
        name = full_name(self.namespace, self.name)
        return _call(self.call_id, name, {CUSTOM_INPUT: self.input})


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> MessageToolCall:
    function = MessageFunctionCall(name=name, arguments=json.dumps(arguments))
    return MessageToolCall(id=call_id, function=function)


class CallOutputItem(Body):
    """The result of a call."""

    IGNORED = frozenset({"caller", "id", "name", "namespace", "status"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NonEmpty
    output: Content

    @field_validator("output", mode="before")
    @classmethod
    def _texts(cls, output: Any, info: ValidationInfo) -> Any:
        return result_texts(output, "input_text", "function_call_output", info.context)

    def message(self) -> Message:
        """The result as a message of a tool."""
        return Message(role="tool", tool_call_id=self.call_id, content=_for_chat(self.output))


class AnsweredCallItem(Body):
    """A call and its result, where another provider's server ran the tool."""

    type: Literal["answered_call"]
    function: FunctionCallItem
    result: CallOutputItem

    def call(self) -> MessageToolCall:
        """See `FunctionCallItem`."""
        return self.function.call()


class ReferenceItem(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"]
    id: NonEmpty


class LeftOut(Body):
    """Keeps the place of an item or a tool that is left out, so that errors name the others by the
    client's places."""

    type: Literal["left_out"]


CallItem = FunctionCallItem | CustomCallItem | AnsweredCallItem
SentItem = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReferenceItem
)
Item = SentItem | AnsweredCallItem
KINDS = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "function_call_output",
        "custom_tool_call_output",
        "item_reference",
    }
)


def _items(given: Any, info: ValidationInfo) -> Any:
    """A text becomes the user's message, and items without a type are messages or references.
    Raises RequestError that names an item of a type that is not known."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    if not isinstance(given, list):
        return given
    items = []
    for at, item in enumerate(given):
        if isinstance(item, dict):
            kind = item.get("type") or _untyped_kind(item)
            if isinstance(kind, str) and kind in LEFT_OUT:
                item = _left_out(kind, info.context)
            elif isinstance(kind, str) and kind in CALL_ITEMS:
                item = _own_item(item, kind, at, info.context)
            else:
                _check_kind(kind, at)
                item = {**item, "type": kind}
        items.append(item)
    return items


def _left_out(kind: str, ignored: list[str] | None) -> dict[str, Any]:
    leave_out(f"input.{kind}", ignored)
    return {"type": "left_out"}


def _own_item(
    item: dict[str, Any], kind: str, at: int, ignored: list[str] | None
) -> dict[str, Any]:
    """The item of another provider's tool as a function's call, result or both. A call without a
    result, where the item should have both, is left out: the model's message behind it tells the
    result. A call without an id has one of its place, which is the same in each turn."""
    fields = CALL_ITEMS[kind]
    call = read_call(item, fields, ignored)
    call_id = call.id
    if not call_id and call.arguments is not None:
        call_id = place_id(at)
    output = {"type": "function_call_output", "call_id": call_id, "output": call.result}
    if call.arguments is None:
        return output
    function = {
        "type": "function_call",
        "call_id": call_id,
        "name": call.name,
        "arguments": json.dumps(call.arguments),
    }
    if not fields.results:
        return function
    if call.result is None:
        return _left_out(kind, ignored)
    return {"type": "answered_call", "function": function, "result": output}


def _untyped_kind(item: dict[str, Any]) -> str:
    is_message = "role" in item or "content" in item or "id" not in item
    return "message" if is_message else "item_reference"


def _check_kind(kind: Any, at: int) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise RequestError(
            ErrorKind.INVALID,
            f"item {at} of the input is of type {str(kind)[:64]!r}, which is not supported by "
            "this server",
            str(at),
        )


def _kept(items: list[Item | LeftOut]) -> list[Item]:
    return [item for item in items if not isinstance(item, LeftOut)]


Items = list[Annotated[SentItem, Field(discriminator="type")]]
Input = Annotated[
    list[Annotated[Item | LeftOut, Field(discriminator="type")]],
    Field(max_length=MOST_MESSAGES),
    BeforeValidator(_items, json_schema_input_type=str | Items),
    AfterValidator(_kept),
]


def says_nothing(item: Item | LeftOut) -> bool:
    """True for thoughts that only another provider can read."""
    return isinstance(item, ReasoningItem) and not item.text


def messages_of(items: Sequence[Item | LeftOut]) -> list[Message]:
    """The messages of a dialogue, in which no item is a reference. Items of replies in a row become
    one message; a second message item begins another one. A reply without text, thoughts and calls
    becomes no message."""
    messages: list[Message] = []
    reply: list[Item] = []
    for item in items:
        assert not isinstance(item, ReferenceItem | LeftOut)
        message = _of_others(item)
        second = isinstance(item, MessageItem) and reply and isinstance(reply[-1], MessageItem)
        if second or message is not None:
            messages += _reply(reply)
            reply = []
        if message is not None:
            messages.append(message)
        else:
            reply.append(item)
        if isinstance(item, AnsweredCallItem):
            messages += [*_reply(reply), item.result.message()]
            reply = []
    return messages + _reply(reply)


def _of_others(item: Item) -> Message | None:
    """The message of an item that is not the assistant's."""
    if isinstance(item, CallOutputItem):
        return item.message()
    if isinstance(item, MessageItem) and item.role != "assistant":
        return Message(role=item.role, content=_for_chat(item.content))
    return None


def _reply(items: Sequence[Item]) -> list[Message]:
    """The assistant's message, if the items say anything. Its texts are joined to the original
    text."""
    if all(map(says_nothing, items)):
        return []
    texts = [part.text for item in items if isinstance(item, MessageItem) for part in item.content]
    thoughts = [item.text for item in items if isinstance(item, ReasoningItem)]
    message = Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=[item.call() for item in items if isinstance(item, CallItem)],
    )
    return [message]
