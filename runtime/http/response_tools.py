"""The tools of OpenAI's Responses API, and the choice among them, in the form of chats.

A custom tool takes free text. The model sees a function with one argument for it. It sees the tools
of a namespace as functions whose names begin with that of the namespace.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    ValidationInfo,
    model_validator,
)

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import MOST_TOOLS
from ..frontend.body_base import Body, leave_out
from ..frontend.chat_messages import Function, FunctionName, NamedTool
from ..frontend.chat_messages import Tool as ChatTool
from .response_items import CUSTOM_INPUT, LeftOut, full_name

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
OWN_TOOLS = ("function", "custom")
"""Types of tools that clients run. The others are run by OpenAI's servers, or need its models."""
NAMESPACE = "namespace"
"""The type of several tools under a common name."""


class FunctionTool(Function):
    """A function. The model sees its fields as the client sent them."""

    IGNORED = frozenset({"allowed_callers", "defer_loading"})

    type: Literal["function"]
    name: ToolName
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[FunctionTool]) -> FunctionTool:
        tool = handler(data)
        tool._sent = {name: value for name, value in data.items() if value is not None}
        try:
            json.dumps(tool._sent, allow_nan=False)
        except ValueError as error:
            raise RequestError(
                ErrorKind.INVALID, "a tool must not have a number that JSON does not have"
            ) from error
        return tool

    def for_chat(self) -> ChatTool:
        """The tool in the form of chats."""
        left = {"type", *self.IGNORED}
        return ChatTool.checked(
            {name: value for name, value in self._sent.items() if name not in left}
        )

    def echo(self) -> dict[str, Any]:
        """The tool in the response."""
        unset = {"description": None, "parameters": None, "strict": None}
        return {"type": "function", "name": self.name, **unset, **self._sent}


class CustomFormat(Body):
    """The form of a custom tool's input: any text, or that of a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> CustomFormat:
        if self.type == "grammar" and (self.syntax is None or self.definition is None):
            raise RequestError(ErrorKind.INVALID, "a grammar needs syntax and definition")
        return self


class CustomTool(Body):
    """A tool that takes free text."""

    IGNORED = frozenset({"allowed_callers", "defer_loading"})

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat = CustomFormat(type="text")

    @property
    def is_followed(self) -> bool:
        """True if the input of a forced call has the form that the tool asks for."""
        return self.format.syntax != "lark"

    def for_chat(self) -> ChatTool:
        """The function that stands for the tool. The model is told of a grammar."""
        text: dict[str, Any] = {"type": "string"}
        about = [] if self.description is None else [self.description]
        form = self.format
        if form.type == "grammar":
            about.append(f"The input follows this grammar ({form.syntax}):\n{form.definition}")
        if form.syntax == "regex":
            text["pattern"] = f"^(?:{form.definition})$"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        function: dict[str, Any] = {"name": self.name}
        if about:
            function["description"] = "\n\n".join(about)
        return ChatTool.checked({**function, "parameters": parameters})

    def echo(self) -> dict[str, Any]:
        """The tool in the response."""
        return self.model_dump(exclude_none=True)


Tool = FunctionTool | CustomTool


def _own_tools(tools: Any, info: ValidationInfo) -> Any:
    """Leaves out the tools that a client does not run."""
    kept = []
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in (*OWN_TOOLS, NAMESPACE):
            leave_out(f"tools.{kind}", info.context)
            tool = {"type": "left_out"}
        kept.append(tool)
    return kept if isinstance(tools, list) else tools


def _kept_tools(tools: list[Any], info: ValidationInfo) -> list[Any]:
    """Names what of the tools is not followed."""
    kept = [tool for tool in tools if not isinstance(tool, LeftOut)]
    for tool in kept:
        if isinstance(tool, CustomTool) and not tool.is_followed:
            leave_out(f"tools.{tool.name}.format", info.context)
    return kept


ToolList = list[Annotated[Tool, Field(discriminator="type")]]


class NamespaceTool(Body):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[Annotated[Tool | LeftOut, Field(discriminator="type")]],
        BeforeValidator(_own_tools, json_schema_input_type=ToolList),
        AfterValidator(_kept_tools),
    ]

    def echo(self) -> dict[str, Any]:
        """The tools in the response."""
        inner = [tool.echo() for tool in self.tools if not isinstance(tool, LeftOut)]
        return {**self.model_dump(exclude={"tools"}, exclude_none=True), "tools": inner}


SentTool = Tool | NamespaceTool
SentTools = list[Annotated[SentTool, Field(discriminator="type")]]
Tools = Annotated[
    list[Annotated[SentTool | LeftOut, Field(discriminator="type")]],
    BeforeValidator(_own_tools, json_schema_input_type=SentTools),
    AfterValidator(_kept_tools),
]


class OwnTool(NamedTuple):
    """A tool that the model may see.

    namespace  None: of none
    about      more of its description
    """

    tool: Tool
    namespace: str | None = None
    about: str | None = None

    @property
    def full_name(self) -> str:
        """The name that the model sees."""
        return full_name(self.namespace, self.tool.name)

    def for_chat(self) -> ChatTool:
        """The tool in the form of chats."""
        plain = self.tool.for_chat()
        if self.namespace is None:
            return plain
        function = plain.for_template()["function"] | {"name": self.full_name}
        if texts := [text for text in (function.get("description"), self.about) if text]:
            function["description"] = "\n\n".join(texts)
        return ChatTool.checked(function)


def own_tools(sent: Sequence[SentTool | LeftOut]) -> list[OwnTool]:
    """The tools one by one. The description of a namespace is in that of its first tool."""
    tools: list[OwnTool] = []
    for given in sent:
        if isinstance(given, FunctionTool | CustomTool):
            tools.append(OwnTool(given))
        elif isinstance(given, NamespaceTool):
            name = given.name
            about = f"About all tools {name}__*: {given.description}" if given.description else None
            for tool in given.tools:
                assert not isinstance(tool, LeftOut)
                tools.append(OwnTool(tool, name, about))
                about = None
    return tools


class ToolReference(Body):
    """A tool by its type and name. One that this server does not run may have no name."""

    IGNORED = frozenset({"server_label"})

    type: str
    name: str | None = None


class AllowedTools(Body):
    """The tools that the model may call, of those in `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


def _supported_choice(choice: Any) -> Any:
    """Raises RequestError for the choice of a tool that this server does not run."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in (*OWN_TOOLS, "allowed_tools"):
        raise RequestError(
            ErrorKind.INVALID,
            f"tool_choice asks for {kind!r}, which this server does not run",
        )
    return choice


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, BaseModel):
        return "allowed" if isinstance(choice, AllowedTools) else "tool"
    if not isinstance(choice, dict):
        return "word"
    return "allowed" if choice.get("type") == "allowed_tools" else "tool"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[ToolReference, Tag("tool")],
    Discriminator(_kind_of_choice),
]
ToolChoice = Annotated[Choice, BeforeValidator(_supported_choice, json_schema_input_type=Choice)]


class ChosenTools(NamedTuple):
    """Tools in the form of chats.

    shown     tools in the prompt
    callable  tools that a reply may call
    choice    the `tool_choice` of a chat
    """

    shown: list[ChatTool]
    callable: list[ChatTool]
    choice: str | NamedTool


def chosen_tools(sent: Sequence[SentTool | LeftOut], choice: Choice) -> ChosenTools:
    """Raises RequestError (INVALID) if the choice does not fit the tools."""
    tools = own_tools(sent)
    names = [tool.full_name for tool in tools]
    if len(sent) > MOST_TOOLS or len(set(names)) < len(names):
        raise RequestError(
            ErrorKind.INVALID,
            f"tools must be at most {MOST_TOOLS}, each with a name of its own",
            "tools",
        )
    shown = [tool.for_chat() for tool in tools]
    if isinstance(choice, ToolReference):
        _check_names([choice], names)
        function = FunctionName.model_construct(name=choice.name)
        return ChosenTools(
            shown, shown, NamedTool.model_construct(type="function", function=function)
        )
    callable_tools = shown
    if isinstance(choice, AllowedTools):
        own = [tool for tool in choice.tools if tool.type in OWN_TOOLS]
        _check_names(own, names)
        allowed = {tool.name for tool in own}
        spaces = {tool.name for tool in choice.tools if tool.type == NAMESPACE}
        callable_tools = [
            seen
            for tool, seen in zip(tools, shown, strict=True)
            if tool.full_name in allowed or tool.namespace in spaces
        ]
        choice = choice.mode
    if choice == "required" and not callable_tools:
        raise RequestError(ErrorKind.INVALID, "tool_choice requires tools", "tool_choice")
    return ChosenTools(shown, callable_tools, choice)


def _check_names(references: Sequence[ToolReference], names: Sequence[str]) -> None:
    for reference in references:
        if reference.name not in names:
            raise RequestError(
                ErrorKind.INVALID, f"tool_choice names {reference.name!r}, no tool", "tool_choice"
            )
