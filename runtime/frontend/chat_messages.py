"""Messages of a dialogue, tools and tool calls: the form that clients send and the form that chat
templates read."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ...scheduler.types import ErrorKind, RequestError
from ..text.template_form import THOUGHTS
from .body_base import Body, NonEmpty, leave_out, with_whole_pairs
from .other_providers import result_texts, told

DEEPEST = 200  # levels of a tool call's arguments; bodies have as many at most
MOST_MESSAGES = 16384  # of one dialogue: other requests wait while each is checked

SET_BY_SERVER = frozenset({"add_generation_prompt", "messages", "tools"})


def _settable(variables: dict[str, Any]) -> dict[str, Any]:
    for name in SET_BY_SERVER & variables.keys():
        raise RequestError(ErrorKind.INVALID, f"chat_template_kwargs cannot set {name}")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_settable)]


def with_thinking(
    variables: dict[str, Any], thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """Returns the variables of a chat template. The client's `thinking` and `effort`, unless they
    are None, are added under the names that templates read."""
    if thinking is None and effort == "none":
        thinking = False
    switched = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    return variables | switched | ({} if effort is None else {"reasoning_effort": effort})


def few_calls(messages: Any) -> Any:
    """Returns the messages as a client sent them. Raises RequestError (INVALID) if they have more
    calls and results than a dialogue may have messages: each takes as long to check as one."""
    calls = 0
    for message in messages if isinstance(messages, list) else ():
        for field in ("content", "tool_calls"):
            parts = message.get(field) if isinstance(message, dict) else None
            if isinstance(parts, list):
                texts = sum(isinstance(part, dict) and part.get("type") == "text" for part in parts)
                calls += len(parts) - texts
    if calls > MOST_MESSAGES:
        raise RequestError(
            ErrorKind.INVALID,
            f"at most {MOST_MESSAGES} calls and results are allowed in one body, not {calls}",
        )
    return messages


def text_only(content: Any, *kinds: str) -> Any:
    """Returns a message's content. Raises RequestError if it has parts of other types than these,
    such as images."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise RequestError(
                ErrorKind.INVALID,
                f"this server reads text only; it has no use for a part of type {kind[:64]!r}",
            )
    return content


class Thinking(Body):
    """Whether and how long the model thinks. `budget_tokens`: the most tokens of a thought.
    `display` has no effect: the server sends every thought, because only the client keeps it."""

    IGNORED = frozenset({"display", "clear_thinking"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def wanted(self) -> bool | None:
        """Whether the model is to think; None: as it likes."""
        return None if self.type == "adaptive" else self.type == "enabled"


class TextPart(Body):
    type: Literal["text"]
    text: str


class MessageFunctionCall(Body):
    IGNORED = frozenset({"parsed_arguments"})  # added by the official client: the parsed arguments

    name: NonEmpty
    arguments: str

    @field_validator("arguments", mode="before")
    @classmethod
    def _written(cls, arguments: Any) -> Any:
        """The messages of GET /v1/conversations/{id} have objects here."""
        return json.dumps(arguments) if isinstance(arguments, dict) else arguments

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: str) -> str:
        try:
            arguments = with_whole_pairs(arguments.encode()).decode()
            parsed = json.loads(arguments or "{}")
            if _is_deep(parsed):
                parsed = None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise RequestError(
                ErrorKind.INVALID,
                "the arguments of a tool call must be a JSON object, written as a string",
            )
        return arguments


def _is_deep(value: Any) -> bool:
    """True if the value is nested more deeply than DEEPEST: others would recurse too far."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(level)


class MessageToolCall(Body):
    """A tool call of an earlier reply, sent back unchanged."""

    IGNORED = frozenset({"index"})

    id: str
    type: Literal["function"] = "function"
    function: MessageFunctionCall

    def for_template(self) -> dict[str, Any]:
        function = {
            "name": self.function.name,
            "arguments": json.loads(self.function.arguments or "{}"),
        }
        return {"id": self.id, "type": self.type, "function": function}


class FunctionName(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(FunctionName):
    """`parameters`: a JSON schema of an object; None: no parameters."""

    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Nothing: the template gets the field (see `Tool`)."""

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if parameters.get("type", "object") != "object":
            raise RequestError(ErrorKind.INVALID, "parameters must be the JSON schema of an object")
        return parameters


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class Tool(Body):
    """A tool. Chat templates read it as the client sent it: its keys in their order, unknown ones
    too."""

    type: Literal["function"]
    function: Function
    _sent: dict[str, Any] | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(data)
        tool._sent = data if isinstance(data, dict) else None
        return tool

    @classmethod
    def checked(cls, function: dict[str, Any]) -> Tool:
        """The tool of a function that another API has checked. Its name may be longer."""
        fields = {name: function[name] for name in Function.model_fields if name in function}
        tool = cls.model_construct(type="function", function=Function.model_construct(**fields))
        tool._sent = {"type": "function", "function": function}
        return tool

    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Nothing: the template gets the field."""

    def for_template(self) -> dict[str, Any]:
        """Null is an absent field, as everywhere."""
        if self._sent is None:
            return self.model_dump(exclude_unset=True)
        function = self._sent["function"]
        return {
            name: _without_nulls(function) if name == "function" else value
            for name, value in _without_nulls(self._sent).items()
        }


def _id_in_old_form(named: Any) -> str:
    """The id of a call, or of a result: in OpenAI's form before tools only the function's name
    joins the two."""
    return f"call_{named.get('name') if isinstance(named, dict) else None}"


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedName(FunctionName):
    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Nothing: clients repeat the whole function, and its name says which it is."""


class AllowedFunction(Body):
    type: Literal["function"]
    function: AllowedName

    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Nothing, as in `AllowedName`."""


class AllowedFunctions(Body):
    """`tools`: the tools that a reply may call, of those of the request."""

    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class AllowedFunctionsChoice(Body):
    """A choice that leaves the prompt, and so its KV, as it is."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ChosenFunctions = Annotated[NamedTool | AllowedFunctionsChoice, Field(discriminator="type")]


class Message(Body):
    """One message of a dialogue. Its other fields are those of a reply that is sent back
    unchanged."""

    IGNORED = frozenset({"parsed"})  # added by the official client: the parsed content
    NEUTRAL: ClassVar = {"refusal": (), "annotations": ([],), "audio": (), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _parts_of_replies(cls, message: Any, info: ValidationInfo) -> Any:
        """Other servers' replies have thoughts among their parts, and a refusal there or beside
        them. Some have what is no text, or a call in the form that OpenAI had before tools."""
        if not isinstance(message, dict):
            return message
        message = _without_nulls(message)
        if message.get("role") == "function":
            return message | {"role": "tool", "tool_call_id": _id_in_old_form(message)}
        if message.get("role") != "assistant":
            return message
        for name in ("annotations", "audio"):
            if message.pop(name, None):
                leave_out(f"messages.{name}", info.context)
        if call := message.pop("function_call", None):
            if message.get("tool_calls"):
                leave_out("messages.function_call", info.context)
            else:
                id = _id_in_old_form(call)
                message["tool_calls"] = [{"id": id, "type": "function", "function": call}]
        content = message.get("content")
        refusal = message.pop("refusal", None)
        if not content and refusal is not None:
            return message | {"content": refusal}
        if refusal:
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            content = [*parts, {"type": "refusal", "refusal": refusal}]
        if not isinstance(content, list):
            return message
        thoughts, parts = [], []
        for part in content:
            match part.get("type") if isinstance(part, dict) else None:
                case "thinking":
                    thoughts.append(told(part.get("thinking") or "", "content", info.context))
                case "refusal":
                    parts.append({"type": "text", "text": part.get("refusal")})
                case "redacted_thinking":
                    pass
                case _:
                    parts.append(part)
        given = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        return given | message | {"content": parts or ""}

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any, info: ValidationInfo) -> Any:
        if info.data.get("role") == "tool":
            content = result_texts(content, "text", "tool", info.context)
        return text_only(content, "text")

    @field_validator(*THOUGHTS, mode="before")
    @classmethod
    def _thoughts_are_text(cls, thoughts: Any, info: ValidationInfo) -> Any:
        """Other servers' fields of these names may hold other things."""
        if thoughts is None or isinstance(thoughts, str):
            return thoughts
        cls._ignore(info.field_name or "", info.context)
        return None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise RequestError(
                ErrorKind.INVALID, "a message without tool_calls needs content", "content"
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as `TemplateForm.messages` takes it."""
        fields = {"role", "content", "name", "tool_call_id", *THOUGHTS}
        message = self.model_dump(include=fields, exclude_none=True)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
