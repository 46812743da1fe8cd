"""OpenAI's items of a conversation: its messages as clients of the Responses API see them.

The history has messages, and items are made of them: a reply's thoughts, its text and each of its
calls are items of one message. An item's id names the dialogue up to its message, so it is the same
after a restart, on another server and in a fork. A reply of the Responses API keeps the ids of its
output. Behind a deleted item the dialogue is another one: there the messages keep their old ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from ...scheduler.types import ErrorKind, RequestError
from ..conversations.transcript import KEPT_IDS, Message, dialogue_keys
from ..frontend.body_base import Body
from ..frontend.chat_messages import MOST_MESSAGES
from ..text.template_form import THOUGHTS, text_of
from .response_items import Input, is_place_id, item_id, place_id

MOST_PAIRS = 16  # of metadata, OpenAI's limit

Item = dict[str, Any]


def _few_pairs(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > MOST_PAIRS:
        raise RequestError(
            ErrorKind.INVALID,
            f"metadata may have {MOST_PAIRS} keys, not {len(metadata)}",
            "metadata",
        )
    return metadata


Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    AfterValidator(_few_pairs),
]


class AddedItems(Body):
    """POST /v1/conversations/{id}/items."""

    items: Input = Field(min_length=1)


def items_of(messages: Sequence[Message]) -> list[Item]:
    """The items of a dialogue, in order."""
    return [item for items in _items_by_message(messages) for item in items]


def added_items(before: Sequence[Message], longer: Sequence[Message]) -> list[Item]:
    """The items that `with_messages` has added to the dialogue `before`."""
    if not before:
        return items_of(longer)
    last, *new = _items_by_message(longer)[len(before) - 1 :]
    return [*last[len(_parts(before[-1])) :], *(item for items in new for item in items)]


def with_messages(
    messages: Sequence[Message], new: Sequence[Message], most_bytes: int
) -> list[Message]:
    """The dialogue with new messages at its end. A reply may come in several requests. Raises
    RequestError (TOO_LARGE) for a dialogue that a body of `most_bytes` could not hold."""
    new = _with_free_ids(messages, new)
    joined = _joined(messages, new[0]) if messages and new else None
    longer = [*messages, *new] if joined is None else [*messages[:-1], joined, *new[1:]]
    size = len(json.dumps(longer, ensure_ascii=False).encode())
    if len(longer) > MOST_MESSAGES or size > most_bytes:
        raise RequestError(
            ErrorKind.TOO_LARGE,
            f"the conversation would be longer than {MOST_MESSAGES} messages or {most_bytes} bytes",
        )
    return longer


def _with_free_ids(messages: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """The new messages with other ids for calls whose id has the form of `place_id`, also one that
    the client chose, if a call of the dialogue has the same id."""
    taken = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    used = taken.union(call["id"] for message in new for call in message.get("tool_calls", ()))
    free = (id for number in count(len(messages)) if (id := place_id(number)) not in used)
    ids: dict[str, str] = {}
    renamed = []
    for message in new:
        if calls := message.get("tool_calls"):
            for call in calls:
                if call["id"] in taken and is_place_id(call["id"]) and call["id"] not in ids:
                    ids[call["id"]] = next(free)
            calls = [{**call, "id": ids.get(call["id"], call["id"])} for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        renamed.append(message)
    return renamed


def _joined(messages: Sequence[Message], new: Message) -> Message | None:
    """The dialogue's last message and the new one as one reply, which keeps the ids of its items;
    None unless it has the items of both in their order."""
    last = messages[-1]
    if not last["role"] == new["role"] == "assistant":
        return None
    calls = [*last.get("tool_calls", ()), *new.get("tool_calls", ())]
    joined = {**last, **new, "content": last["content"] or new["content"]}
    joined |= {"tool_calls": calls} if calls else {}
    if _parts(joined) != [*_parts(last), *_parts(new)]:
        return None
    items = _items_by_message([*messages, new])[-2:]
    return {**joined, KEPT_IDS: [item["id"] for own in items for item in own]}


def without_item(messages: Sequence[Message], id: str) -> list[Message]:
    """The dialogue without the item of this id. Raises RequestError (NOT_FOUND)."""
    items = _items_by_message(messages)
    at, place = _place(items, id)
    ids = [[item["id"] for item in own] for own in items]
    del ids[at][place]
    rest = [_without_part(messages[at], items[at], place)] if ids[at] else []
    moved = [*rest, *messages[at + 1 :]]
    kept_ids = [own for own in ids[at:] if own]
    return [
        *messages[:at],
        *({**message, KEPT_IDS: own} for message, own in zip(moved, kept_ids, strict=True)),
    ]


def _items_by_message(messages: Sequence[Message]) -> list[list[Item]]:
    """For each message its items, at least one. Kept ids are part of the dialogue that later ids
    name: otherwise two equal messages had one id, when an equal one in front of them is deleted."""
    named = [
        {**message, "ids": message[KEPT_IDS]} if KEPT_IDS in message else message
        for message in messages
    ]
    keys = dialogue_keys("", named)[1:]
    return [
        _with_ids(_parts(message), message.get(KEPT_IDS, ()), key.hex()[:32])
        for message, key in zip(messages, keys, strict=True)
    ]


def _with_ids(items: list[Item], ids: Sequence[str], dialogue: str) -> list[Item]:
    """`ids`: kept ones, if there is one for each item."""
    if len(ids) != len(items):
        ids = [item_id(item["type"], dialogue, number) for number, item in enumerate(items)]
    return [{"id": id, **item} for id, item in zip(ids, items, strict=True)]


def _parts(message: Message) -> list[Item]:
    """The items of a message, without ids: thoughts, text, calls."""
    role = message["role"]
    content = message["content"]
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    done = {"status": "completed"}
    if role == "tool":
        parts = [{"type": "input_text", "text": text} for text in texts]
        output = parts if isinstance(content, list) else content
        call_id = message.get("tool_call_id", "")
        return [{"type": "function_call_output", "call_id": call_id, "output": output, **done}]
    items: list[Item] = []
    if thoughts := next((message[name] for name in THOUGHTS if message.get(name)), None):
        written = [{"type": "reasoning_text", "text": thoughts}]
        items.append({"type": "reasoning", "summary": [], "content": written, **done})
    calls = [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            **done,
        }
        for call in message.get("tool_calls", ())
    ]
    if text_of(content) or not (items or calls):
        kind = (
            {"type": "output_text", "annotations": [], "logprobs": []}
            if role == "assistant"
            else {"type": "input_text"}
        )
        shown = [{**kind, "text": text} for text in texts]
        items.append({"type": "message", "role": role, "content": shown, **done})
    return [*items, *calls]


def _place(items: Sequence[Sequence[Item]], id: str) -> tuple[int, int]:
    """The place of the message, and of the item in it. Raises RequestError (NOT_FOUND)."""
    for at, own in enumerate(items):
        for place, item in enumerate(own):
            if item["id"] == id:
                return at, place
    raise no_item(id, "item_id")


def no_item(id: str, param: str) -> RequestError:
    """The error for an id that no item of the conversation has."""
    return RequestError(ErrorKind.NOT_FOUND, f"the conversation has no item {id[:100]!r}", param)


def _without_part(message: Message, items: Sequence[Item], place: int) -> Message:
    """The message without one of its several items."""
    kind = items[place]["type"]
    if kind == "reasoning":
        return {name: value for name, value in message.items() if name not in THOUGHTS}
    if kind == "message":
        return {**message, "content": ""}
    call = place - len(items) + len(message["tool_calls"])
    calls = [*message["tool_calls"][:call], *message["tool_calls"][call + 1 :]]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "tool_calls": calls} if calls else rest
