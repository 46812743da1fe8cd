"""Tool calls in a model's text, in the form that Hermes, Qwen and others are trained on:

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..step.grammar import lark_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    """`arguments`: a JSON object as text."""

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Takes tool calls out of a growing text. What is not a well-formed call stays text; white space around calls goes.

    said | held: white space, the beginning of a tag, or a call that is not closed
    """

    def __init__(self, most: int):
        """`most`: calls beyond so many are left out."""
        self._most = most
        self._held = ""
        self._inside = False
        self._searched = 0  # so many signs of what is held have no tag that counts
        self._count = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """More of the text. Returns what may be said, and the calls that are complete now."""
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        while (cut := self._held.find(CLOSE if self._inside else OPEN, self._searched)) >= 0:
            if self._inside:
                source = self._held[:cut].lstrip()[len(OPEN) :]
                call = self._parse(source)
                if call is None and _ends_in_string(source):
                    self._searched = cut + len(CLOSE)
                    continue
                if call is None:
                    said.append(self._held[: cut + len(CLOSE)])
                elif call.index < self._most:
                    calls.append(call)
                self._held, self._searched = self._held[cut + len(CLOSE) :], 0
            else:
                said.append(self._say(cut))
            self._inside = not self._inside
        if not self._inside:
            said.append(self._say(len(self._held) - _begun(self._held)))
        return "".join(said), calls

    def end(self) -> str:
        """The text is over: what is still held, unless it is white space behind a call."""
        rest, self._held = self._held, ""
        return "" if self._count and not rest.strip() else rest

    def _say(self, end: int) -> str:
        """Takes what is held up to `end`, but for the white space before it: that goes if a call follows."""
        said = self._held[:end].rstrip()
        self._held = self._held[len(said) :]
        return said

    def _parse(self, source: str) -> ToolCall | None:
        try:
            call = json.loads(source)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = call.get("arguments", {})
            if not isinstance(arguments, dict):
                return None
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # Python reads NaN, and 1e999 as infinity
        except (ValueError, RecursionError):
            return None
        self._count += 1
        return ToolCall(self._count - 1, f"call_{uuid.uuid4().hex[:24]}", _sendable(call["name"]), _sendable(text))


def _begun(text: str) -> int:
    """How many signs at the end of `text` may become OPEN."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)


def _ends_in_string(source: str) -> bool:
    """Whether JSON that goes on behind `source` goes on inside a string."""
    try:
        json.loads(source)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _sendable(text: str) -> str:
    """Halves of surrogate pairs, which JSON may name but UTF-8 cannot carry, become question marks."""
    return text.encode(errors="replace").decode()


def tool_calls_rules(functions: Sequence[dict[str, Any]], several: bool) -> str:
    """Lark rules for `calls`: calls of these functions (`name`, `parameters`: a JSON schema, without one no arguments),
    one, or if `several` any number from one on."""
    line = json.dumps("\n")
    rules = [
        f"calls: call ({line} call)*" if several else "calls: call",
        f"call: {json.dumps(OPEN)} {line} body {line} {json.dumps(CLOSE)}",
        "body: " + " | ".join(f"function{at}" for at in range(len(functions))),
    ]
    for at, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        schema = {"type": "object", **(function.get("parameters") or NO_PARAMETERS)}
        rules.append(f'function{at}: {head} {lark_json(schema)} "}}"')
    return "\n".join(rules)
