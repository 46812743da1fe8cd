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
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def for_template(self) -> dict[str, Any]:
        """The call in the form that chat templates read."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Removes tool calls from a growing text. Text that is not a well-formed call stays; white
    space around calls is removed.

    returned | held: white space, the beginning of a tag, or a call that is not closed
    """

    def __init__(self, most: int):
        """`most`: further calls are dropped."""
        self._most = most
        self._held = ""
        self._inside = False
        self._searched = 0  # count of the held characters that contain no tag that counts
        self._count = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Takes more of the text. Returns the text that may be sent, and the calls that are now
        complete."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while (cut := self._held.find(CLOSE if self._inside else OPEN, self._searched)) >= 0:
            if self._inside:
                source = self._held[:cut].lstrip()[len(OPEN) :]
                call = self._parse(source)
                if call is None and _ends_in_string(source):
                    self._searched = cut + len(CLOSE)
                    continue
                if call is None:
                    content.append(self._held[: cut + len(CLOSE)])
                elif call.index < self._most:
                    calls.append(call)
                self._held = self._held[cut + len(CLOSE) :]
                self._searched = 0
            else:
                content.append(self._say(cut))
            self._inside = not self._inside
        if not self._inside:
            content.append(self._say(len(self._held) - _begun(self._held)))
        return "".join(content), calls

    def end(self) -> str:
        """Ends the text. Returns the held text, unless it is white space after a call."""
        rest = self._held
        self._held = ""
        return "" if self._count and not rest.strip() else rest

    def _say(self, end: int) -> str:
        """Removes and returns the held text up to `end`, without the white space before `end`,
        which is dropped if a call follows."""
        content = self._held[:end].rstrip()
        self._held = self._held[len(content) :]
        return content

    def _parse(self, source: str) -> ToolCall | None:
        try:
            call = json.loads(source)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = call.get("arguments", {})
            if not isinstance(arguments, dict):
                return None
            # raises for NaN and infinity, which Python's JSON parser accepts (1e999)
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        self._count += 1
        return ToolCall(
            self._count - 1,
            f"call_{uuid.uuid4().hex[:24]}",
            _sendable(call["name"]),
            _sendable(text),
        )


def _begun(text: str) -> int:
    """How many characters at the end of `text` may be the beginning of OPEN."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)


def _ends_in_string(source: str) -> bool:
    """Returns whether the JSON text `source` ends inside a string."""
    try:
        json.loads(source)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _sendable(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON may contain but UTF-8 cannot encode, by
    question marks."""
    return text.encode(errors="replace").decode()


def tool_calls_rules(functions: Sequence[dict[str, Any]], several: bool) -> str:
    """Lark rules for `calls`: calls of these functions (`name`, `parameters`: a JSON schema;
    without one, no arguments), exactly one, or with `several` one or more."""
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
