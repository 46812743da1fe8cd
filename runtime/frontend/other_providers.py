"""What other providers leave in a history: calls of tools that they run, and parts that are no
text. The model reads them as calls of functions and as texts."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

from .body_base import leave_out

MEDIA = {
    "computer_screenshot": "image",
    "container_upload": "file",
    "document": "document",
    "file": "file",
    "image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "input_file": "file",
    "input_image": "image",
}
"""Parts of messages that are no text, by their types in the three APIs, and their names for the
model."""

REFERENCES = frozenset({"search_result", "tool_reference"})
"""Parts that only Anthropic's API has. The model reads their JSON."""


class CallFields(NamedTuple):
    """Where an item has what the model reads. Of several fields the first counts that is not null.

    arguments  fields of a call with its arguments
    results    fields with a result
    name       of the tool; None: the item has it
    """

    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    name: str | None = None


CALL_ITEMS = {
    "apply_patch_call": CallFields(("operation",), name="apply_patch"),
    "apply_patch_call_output": CallFields(results=("output", "status")),
    "code_interpreter_call": CallFields(("code",), ("outputs",), "code_interpreter"),
    "computer_call": CallFields(("actions", "action"), name="computer"),
    "computer_call_output": CallFields(results=("output",)),
    "file_search_call": CallFields(("queries",), ("results",), "file_search"),
    "local_shell_call": CallFields(("action",), name="local_shell"),
    "local_shell_call_output": CallFields(results=("output",)),
    "mcp_call": CallFields(("arguments",), ("output", "error")),
    "program": CallFields(("code",), name="program"),
    "program_output": CallFields(results=("result",)),
    "shell_call": CallFields(("action",), name="shell"),
    "shell_call_output": CallFields(results=("output",)),
}
"""Items of the Responses API."""

CALL_BLOCKS = {
    "mcp_tool_use": CallFields(("input",)),
    "server_tool_use": CallFields(("input",)),
    **dict.fromkeys(
        (
            "advisor_tool_result",
            "bash_code_execution_tool_result",
            "code_execution_tool_result",
            "mcp_tool_result",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "web_fetch_tool_result",
            "web_search_tool_result",
        ),
        CallFields(results=("content",)),
    ),
}
"""Blocks of Anthropic's API."""


class ReadCall(NamedTuple):
    """What the model reads of an item or block.

    id         of the call; empty or None: the item has none
    name       of the tool
    arguments  None: it is no call
    result     None: it has none
    """

    id: Any
    name: Any
    arguments: dict[str, Any] | None
    result: str | None


def read_call(item: dict[str, Any], fields: CallFields, ignored: list[str] | None) -> ReadCall:
    """Returns what the model reads of the item. `ignored`: as for `leave_out`."""
    ids = (item.get(name) for name in ("call_id", "tool_use_id", "id"))
    id = next((given for given in ids if given), None)
    server = item.get("server_label", item.get("server_name"))
    name = fields.name or item.get("name")
    if isinstance(server, str) and isinstance(name, str):
        name = f"{server}__{name}"
    arguments, result = None, None
    if fields.arguments:
        field, value = _first(item, fields.arguments)
        arguments = _arguments(field, value)
    if fields.results:
        _, value = _first(item, fields.results)
        # an answer that is empty is one too, but a call may lack its answer
        if value is not None or not fields.arguments:
            result = told(value or "", item["type"], ignored)
    return ReadCall(id, name, arguments, result)


def _first(item: dict[str, Any], fields: tuple[str, ...]) -> tuple[str, Any]:
    given = (field for field in fields if item.get(field) is not None)
    field = next(given, fields[-1])
    return field, item.get(field)


def _arguments(field: str, value: Any) -> dict[str, Any]:
    """A value that is no object is one argument, by its field's name."""
    if value is None:
        return {}
    if field == "arguments" and isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):  # else it stays a text
            value = json.loads(value or "{}")
    return value if isinstance(value, dict) else {field: value}


def result_texts(content: Any, text: str, where: str, ignored: list[str] | None) -> Any:
    """Returns the content of a tool's result, with a part of type `text` in the place of each part
    of MEDIA and REFERENCES. An agent sends what its tools return in each later turn too: a refusal
    would end its session.

    `where`, `ignored`: as for `told`."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if _kind(part) in MEDIA or _kind(part) in REFERENCES:
            marker = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
            part = {"type": text, "text": told(part, where, ignored), **marker}
        parts.append(part)
    return parts


def told(value: Any, where: str, ignored: list[str] | None) -> str:
    """Returns what the model reads: a text as it is, several texts as lines, all else as JSON.

    `where`: the beginning of the names of what it cannot read; `ignored`: as for `leave_out`."""
    plain = _readable(value, where, ignored)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, list) and all(isinstance(part, str) for part in plain):
        return "\n".join(plain)
    return json.dumps(plain, ensure_ascii=False)


def _readable(value: Any, where: str, ignored: list[str] | None) -> Any:
    """The value without media and without what only its provider can read."""
    if isinstance(value, list):
        return [_readable(part, where, ignored) for part in value]
    if not isinstance(value, dict):
        return value
    kind = _kind(value)
    if kind in MEDIA:
        source = value.get("source")
        field = {"text": "data", "content": "content"}.get(_kind(source))
        if isinstance(source, dict) and field is not None:
            lines = (value.get("title"), value.get("context"), source.get(field))
            return "\n".join(told(line, where, ignored) for line in lines if line)
        leave_out(f"{where}.{kind}", ignored)
        return f"[{MEDIA[kind]} left out: this model reads text only]"
    if kind.endswith("text") and isinstance(value.get("text"), str):
        return value["text"]
    kept = {}
    for name, part in value.items():
        if name.startswith("encrypted_"):
            leave_out(f"{where}.{name}", ignored)
        elif part is not None and name not in ("cache_control", "citations"):
            kept[name] = _readable(part, where, ignored)
    return kept


def _kind(part: Any) -> str:
    """The part's type, or nothing."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""
