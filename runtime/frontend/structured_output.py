"""Turns the fields for a reply's form (`response_format`, `structured_outputs`, tools) into one
grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...scheduler.types import ErrorKind, RequestError
from ..step.grammar import (
    choice_grammar,
    json_grammar,
    lark_grammar,
    lark_json,
    regex_grammar,
    written_grammar,
)
from .body_base import Body, NonEmpty, with_whole_pairs
from .chat_messages import NamedTool, Tool
from .reply_forms import ReplyForms

ANY_OBJECT: dict[str, Any] = {"type": "object"}
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names for the fields of `structured_outputs`."""


class ResponseFormat(Body):
    """`json_schema`: OpenAI's object that contains a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's field: exactly one of these. `json`: a schema, or one as text. `grammar`: in
    llguidance's dialect of Lark."""

    IGNORED = frozenset(
        {"disable_additional_properties", "disable_any_whitespace", "disable_fallback"}
    )
    NEUTRAL: ClassVar = {"structural_tag": (), "whitespace_pattern": ()}

    json_: dict[str, Any] | NonEmpty | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    grammar: NonEmpty | None = None

    @property
    def wanted(self) -> dict[str, Any]:
        """The fields that are set, by their names in JSON."""
        values = {name.rstrip("_"): getattr(self, name) for name in type(self).model_fields}
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False
        }

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self.wanted) != 1:
            raise RequestError(
                ErrorKind.INVALID,
                "structured_outputs must have one of json, json_object, regex, choice, grammar",
            )
        return self


@dataclass(frozen=True)
class ToolsForm:
    """Calls of these functions (`name`, `parameters`: a JSON schema), or a reply of this schema."""

    functions: tuple[dict[str, Any], ...]
    several: bool
    reply: dict[str, Any] | None = None

    def grammar(self, forms: ReplyForms) -> str:
        """The grammar in the form of the model's replies."""
        rules = forms.calls_rules(self.functions, self.several)
        if self.reply is None:
            return lark_grammar(f"start: calls\n{rules}")
        head = forms.message_head
        return lark_grammar(f"start: calls | reply\nreply: {head} {lark_json(self.reply)}\n{rules}")

    def with_any_arguments(self, names: Collection[str]) -> ToolsForm:
        """The same with any arguments for these functions."""
        functions = tuple(
            {**function, "parameters": _with_any_values(function)}
            if function["name"] in names
            else function
            for function in self.functions
        )
        return replace(self, functions=functions)


def _with_any_values(function: dict[str, Any]) -> dict[str, Any]:
    """A schema of the same arguments without their schemas."""
    properties = (function.get("parameters") or {}).get("properties")
    names = properties if isinstance(properties, dict) else ()
    return {**ANY_OBJECT, "properties": {name: {} for name in names}}


@dataclass(frozen=True)
class ReplyForm:
    """A grammar.

    param    the field of the body to name if it does not compile
    grammar  of the reply's content; "" for `tools`, whose grammar depends on the model
    tools    what the grammar is made of if it has tool calls
    remarks  what of the request it does not enforce (`GrammarChecker`)
    """

    param: str
    grammar: str
    tools: ToolsForm | None = None
    remarks: tuple[str, ...] = ()


def reply_form(
    response_format: ResponseFormat | None,
    constraints: Mapping[str, Any],
    tools: Sequence[Tool] = (),
    tool_choice: str | NamedTool = "none",
    parallel_tool_calls: bool = False,
    param: str = "response_format",
) -> ReplyForm | None:
    """Returns the form that the reply must have, None for any. Raises RequestError (INVALID) if two
    fields set it, except two names of one `structured_outputs` that are equal.

    param           the field that contains `response_format`, for errors
    constraints     `structured_outputs` and the fields in `GUIDED`, as far as they are set
    """
    schema = _schema(response_format, param) if response_format is not None else None
    given = list(constraints)
    grammars = [_constraint_grammar(name, value) for name, value in constraints.items()]
    for name, grammar in zip(given, grammars, strict=True):
        if grammar != grammars[0]:
            raise RequestError(
                ErrorKind.INVALID,
                f"{given[0]} and {name} cannot be combined unless they are equal",
                name,
            )
    if tools and tool_choice != "none":
        if given:
            raise RequestError(
                ErrorKind.INVALID, f"{given[0]} and tools cannot be combined", given[0]
            )
        return _with_tools(tools, tool_choice, parallel_tool_calls, schema, param)
    if given:
        name = given[0]
        if schema is not None:
            raise RequestError(ErrorKind.INVALID, f"{param} and {name} cannot be combined", name)
        return ReplyForm(name, grammars[0])
    if schema is None:
        return None
    return ReplyForm(param, _schema_grammar(schema, param))


def _constraint_grammar(name: str, value: Any) -> str:
    """The grammar of `structured_outputs` or of an older name of one of its fields."""
    given = value.wanted if isinstance(value, StructuredOutputs) else {name: value}
    ((form, wanted),) = given.items()
    return _grammar(form.removeprefix("guided_"), wanted, name)


def _with_tools(
    tools: Sequence[Tool],
    tool_choice: str | NamedTool,
    parallel_tool_calls: bool,
    schema: dict[str, Any] | None,
    param: str,
) -> ReplyForm | None:
    """Tool calls if they are required; tool calls or the requested JSON if the model may choose."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if isinstance(tool_choice, NamedTool):
        named = [f for f in functions if f["name"] == tool_choice.function.name]
        form = ToolsForm(tuple(named), several=False)
    elif tool_choice == "required":
        form = ToolsForm(tuple(functions), parallel_tool_calls)
    elif schema is not None:
        form = ToolsForm(tuple(functions), parallel_tool_calls, schema)
        return ReplyForm(param, "", form)
    else:
        return None
    return ReplyForm("tools", "", form)


def _schema(response_format: ResponseFormat, param: str) -> dict[str, Any] | None:
    """The JSON schema of `response_format`, None for plain text."""
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return ANY_OBJECT
    schema = (response_format.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise RequestError(
            ErrorKind.INVALID,
            f"{param} needs an object json_schema.schema",
            param,
        )
    return schema


def _schema_grammar(schema: dict[str, Any], param: str) -> str:
    try:
        return json_grammar(schema)
    except ValueError as error:
        raise RequestError(
            ErrorKind.INVALID,
            f"{param} has a schema that is not JSON: look for NaN and Infinity",
            param,
        ) from error


def _grammar(form: str, value: Any, param: str) -> str:
    """`form`: the name of a field of `structured_outputs`."""
    match form:
        case "json_object":
            return json_grammar(ANY_OBJECT)
        case "json":
            return _schema_grammar(_object(value, param), param)
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
        parsed = schema
        if isinstance(schema, str):
            parsed = json.loads(with_whole_pairs(schema.encode()))
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(ErrorKind.INVALID, f"{param}: the JSON schema must be an object", param)
    return parsed
