"""From what a body asks of a reply's form (`response_format`, `structured_outputs`, tools) to one grammar."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...scheduler.types import RequestError
from ..step.grammar import choice_grammar, json_grammar, lark_grammar, lark_json, regex_grammar
from .bodies import ChatBody, ChoicesBody, ResponseFormat, StructuredOutputs
from .chat_messages import NamedTool
from .tool_calls import tool_calls_rules

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class ReplyForm(NamedTuple):
    """A grammar, and the field of the body to blame if it does not compile."""

    param: str
    grammar: str


def reply_form(body: ChoicesBody) -> ReplyForm | None:
    """What the reply must follow, None if anything goes. Raises RequestError (400) if two fields ask for it."""
    asked = body.response_format
    schema = _schema(asked) if asked is not None else None
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        if body.structured_outputs is not None:
            raise RequestError(400, "structured_outputs and tools cannot be combined", "structured_outputs")
        return _with_tools(body, schema)
    if body.structured_outputs is not None:
        if schema is not None:
            raise RequestError(400, "response_format and structured_outputs cannot be combined", "structured_outputs")
        return ReplyForm("structured_outputs", _structured(body.structured_outputs))
    return ReplyForm("response_format", json_grammar(schema)) if schema is not None else None


def _with_tools(body: ChatBody, schema: dict[str, Any] | None) -> ReplyForm | None:
    """Calls where they are required; calls or the JSON asked for where the model chooses."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        functions = [function for function in functions if function["name"] == body.tool_choice.function.name]
        return ReplyForm("tools", lark_grammar("start: calls\n" + tool_calls_rules(functions, several=False)))
    rules = tool_calls_rules(functions, body.parallel_tool_calls)
    if body.tool_choice == "required":
        return ReplyForm("tools", lark_grammar(f"start: calls\n{rules}"))
    if schema is None:
        return None
    return ReplyForm("response_format", lark_grammar(f"start: calls | reply\nreply: {lark_json(schema)}\n{rules}"))


def _schema(asked: ResponseFormat) -> dict[str, Any] | None:
    """The JSON schema that `response_format` asks for, None for plain text."""
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return ANY_OBJECT
    schema = (asked.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise RequestError(400, "response_format needs an object json_schema.schema", "response_format")
    return schema


def _structured(asked: StructuredOutputs) -> str:
    if asked.json_object:
        return json_grammar(ANY_OBJECT)
    if asked.json_ is not None:
        return json_grammar(asked.json_)
    if asked.regex is not None:
        return regex_grammar(asked.regex)
    if asked.choice is not None:
        return choice_grammar(asked.choice)
    assert asked.grammar is not None
    return lark_grammar(asked.grammar)
