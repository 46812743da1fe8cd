"""Turns the fields for a reply's form (`response_format`, `structured_outputs`, tools) into one
grammar."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...scheduler.types import ErrorKind, RequestError
from ..step.grammar import (
    choice_grammar,
    json_grammar,
    lark_grammar,
    lark_json,
    regex_grammar,
    written_grammar,
)
from .bodies import ChatBody, ChoicesBody, ResponseFormat
from .chat_messages import NamedTool
from .tool_calls import tool_calls_rules

ANY_OBJECT: dict[str, Any] = {"type": "object"}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names for the fields of `structured_outputs`."""


class ReplyForm(NamedTuple):
    """A grammar, and the field of the body to name if it does not compile."""

    param: str
    grammar: str


def reply_form(body: ChoicesBody) -> ReplyForm | None:
    """Returns the form that the reply must have, None for any. Raises RequestError (400) if two
    fields set it."""
    asked = body.response_format
    schema = _schema(asked) if asked is not None else None
    given = [name for name in ("structured_outputs", *GUIDED) if getattr(body, name) is not None]
    if len(given) > 1:
        raise RequestError(
            ErrorKind.INVALID, f"{given[0]} and {given[1]} cannot be combined", given[1]
        )
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        if given:
            raise RequestError(
                ErrorKind.INVALID, f"{given[0]} and tools cannot be combined", given[0]
            )
        return _with_tools(body, schema)
    if given:
        (name,) = given
        if schema is not None:
            raise RequestError(
                ErrorKind.INVALID, f"response_format and {name} cannot be combined", name
            )
        value = getattr(body, name)
        forms = (
            value.asked if name == "structured_outputs" else {name.removeprefix("guided_"): value}
        )
        ((form, asked_for),) = forms.items()
        return ReplyForm(name, _grammar(form, asked_for, name))
    return ReplyForm("response_format", json_grammar(schema)) if schema is not None else None


def _with_tools(body: ChatBody, schema: dict[str, Any] | None) -> ReplyForm | None:
    """Tool calls if they are required; tool calls or the requested JSON if the model may choose."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        functions = [
            function for function in functions if function["name"] == body.tool_choice.function.name
        ]
        return ReplyForm(
            "tools", lark_grammar("start: calls\n" + tool_calls_rules(functions, several=False))
        )
    rules = tool_calls_rules(functions, body.parallel_tool_calls)
    if body.tool_choice == "required":
        return ReplyForm("tools", lark_grammar(f"start: calls\n{rules}"))
    if schema is None:
        return None
    return ReplyForm(
        "response_format",
        lark_grammar(f"start: calls | reply\nreply: {lark_json(schema)}\n{rules}"),
    )


def _schema(asked: ResponseFormat) -> dict[str, Any] | None:
    """The JSON schema of `response_format`, None for plain text."""
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return ANY_OBJECT
    schema = (asked.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise RequestError(
            ErrorKind.INVALID,
            "response_format needs an object json_schema.schema",
            "response_format",
        )
    return schema


def _grammar(form: str, value: Any, param: str) -> str:
    """`form`: the name of a field of `structured_outputs`."""
    match form:
        case "json_object":
            return json_grammar(ANY_OBJECT)
        case "json":
            return json_grammar(_object(value, param))
        case "regex":
            return regex_grammar(value)
        case "choice":
            return choice_grammar(value)
    try:
        return written_grammar(value)
    except ValueError as error:
        raise RequestError(
            ErrorKind.INVALID, f"{param} cannot be read as EBNF: {error}", param
        ) from error


def _object(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Returns the schema, which may be given as text."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(ErrorKind.INVALID, f"{param}: the JSON schema must be an object", param)
    return parsed
