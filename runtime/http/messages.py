"""Anthropic's Messages API: the bodies of /v1/messages and /v1/messages/count_tokens.

A body becomes a `Generate`: text blocks become text, `tool_use` and `tool_result` blocks become
tool calls and messages of tools, as chat templates read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import (
    BadWords,
    ConversationParams,
    GenerationBody,
    Wait,
    check_continued,
    dialogue,
    named_session,
)
from ..frontend.body_base import Affinity, Body, ConversationId, NonEmpty, leave_out
from ..frontend.chat_messages import (
    MOST_MESSAGES,
    Function,
    FunctionName,
    Message,
    MessageFunctionCall,
    MessageToolCall,
    NamedTool,
    Thinking,
    few_calls,
    with_thinking,
)
from ..frontend.chat_messages import Tool as ChatTool
from ..frontend.generate import Generate
from ..frontend.other_providers import CALL_BLOCKS, read_call, result_texts, told
from ..frontend.reply import Style
from ..frontend.structured_output import ResponseFormat, reply_form
from ..text.tokenizer import Tokenizer
from .message_writer import MessageWriter

BILLING = "x-anthropic-billing-header:"
"""The beginning of the first line of Claude Code's system prompt. The line identifies the client's
account and is not for the model. It differs in each request, so with it two prompts would never
share a prefix."""

EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that only Anthropic's models know, and the nearest that templates know."""

TOLD_BLOCKS = ("container_upload", "search_result")
"""Blocks that become a text for the model."""

LEFT_OUT = ("compaction", "fallback", "mcp_tool_listing")
"""Blocks that the model does not see, except the text of a compaction."""

MOST_STOPS = 16
TOKENS_LEFT = re.compile("<total_tokens>[0-9]+ tokens left</total_tokens>")
"""Claude Code's count of its remaining tokens, another in each request."""

LONGEST_SESSION = 1000  # characters of a name
KEEP_S = {"5m": 300.0, "1h": 3600.0}


class CacheControl(Body):
    """A request to keep the prompt up to here."""

    IGNORED = frozenset({"scope"})

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Body):
    IGNORED = frozenset({"citations", "parsed_output"})

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """Thoughts in an earlier reply. Redacted ones have no text."""

    IGNORED = frozenset({"signature", "data"})

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Body):
    """A tool call of an earlier reply."""

    IGNORED = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: NonEmpty
    name: NonEmpty
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def call(self) -> MessageToolCall:
        """The call in OpenAI's form."""
        function = MessageFunctionCall(name=self.name, arguments=json.dumps(self.input))
        return MessageToolCall(id=self.id, function=function)


def _blocks(content: Any, *kinds: str) -> Any:
    """Text alone becomes one block of text. Raises RequestError for a block of another kind than
    these."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for block in content if isinstance(content, list) else ():
        if (
            isinstance(block, dict)
            and isinstance(block.get("type"), str)
            and block["type"] not in kinds
        ):
            raise RequestError(
                ErrorKind.INVALID, f"{block['type']} blocks are not supported here by this server"
            )
    return content


def _text_blocks(content: Any) -> Any:
    return _blocks(content, "text")


def _user_blocks(content: Any, info: ValidationInfo) -> Any:
    """Claude Code sends a document that its tool has read beside the tool's result."""
    if isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") == "tool_result" for block in content
    ):
        content = result_texts(content, "text", "tool_result", info.context)
    own = ("text", "tool_result")
    return _as_own(_blocks(content, *own, *CALL_BLOCKS, *TOLD_BLOCKS, *LEFT_OUT), info.context)


def _assistant_blocks(content: Any, info: ValidationInfo) -> Any:
    own = ("text", "thinking", "redacted_thinking", "tool_use")
    return _as_own(_blocks(content, *own, *CALL_BLOCKS, *TOLD_BLOCKS, *LEFT_OUT), info.context)


def _as_own(blocks: Any, ignored: list[str] | None) -> Any:
    """Returns the blocks of Anthropic's own tools and other features as blocks of text, calls and
    results. An empty text keeps the place of a block that is left out."""
    if not isinstance(blocks, list):
        return blocks
    return [_own_block(block, ignored) if isinstance(block, dict) else block for block in blocks]


def _own_block(block: dict[str, Any], ignored: list[str] | None) -> dict[str, Any]:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in (*CALL_BLOCKS, *TOLD_BLOCKS, *LEFT_OUT):
        return block
    marker = {"cache_control": block.get("cache_control")}
    if kind in CALL_BLOCKS:
        call = read_call(block, CALL_BLOCKS[kind], ignored)
        if call.arguments is not None:
            fields = {"id": call.id, "name": call.name, "input": call.arguments}
            return {"type": "tool_use", **fields, **marker}
        return {"type": "tool_result", "tool_use_id": call.id, "content": call.result, **marker}
    if kind in TOLD_BLOCKS:
        return {"type": "text", "text": told(block, "messages", ignored), **marker}
    if isinstance(block.get("content"), str):  # the summary of a compaction
        return {"type": "text", "text": block["content"], **marker}
    leave_out(f"messages.{kind}", ignored)
    return {"type": "text", "text": "", **marker}


Texts = Annotated[
    list[TextBlock], BeforeValidator(_text_blocks, json_schema_input_type=str | list[TextBlock])
]


def _lines(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _without_tokens_left(blocks: Iterable[TextBlock]) -> list[TextBlock]:
    """A block that has nothing else vanishes."""
    kept = []
    for block in blocks:
        text = TOKENS_LEFT.sub("", block.text)
        if text == block.text:
            kept.append(block)
        elif text.strip():
            kept.append(block.model_copy(update={"text": text}))
    return kept


class ToolResultBlock(Body):
    """`is_error` has no effect: the content tells the model of an error."""

    IGNORED = frozenset({"is_error", "toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: NonEmpty
    content: Texts = Field(default_factory=list)
    cache_control: CacheControl | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _texts(cls, content: Any, info: ValidationInfo) -> Any:
        return result_texts(content, "text", "tool_result", info.context)

    def message(self) -> Message:
        return Message(role="tool", tool_call_id=self.tool_use_id, content=_lines(self.content))


UserBlocks = list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]
SentReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock
SentReplyBlocks = list[Annotated[SentReplyBlock, Field(discriminator="type")]]
AssistantBlocks = list[Annotated[SentReplyBlock | ToolResultBlock, Field(discriminator="type")]]
"""With the results of tools that another provider's server ran."""


class UserMessage(Body):
    role: Literal["user"]
    content: Annotated[
        UserBlocks,
        BeforeValidator(_user_blocks, json_schema_input_type=str | UserBlocks),
        Field(min_length=1),
    ]

    def messages(self) -> list[Message]:
        """One message for each result of a tool, and one for the text between them."""
        messages: list[Message] = []
        for _, blocks in groupby(self.content, key=type):
            run = list(blocks)
            texts = [block for block in run if isinstance(block, TextBlock)]
            messages += [Message(role="user", content=_lines(texts))] if texts else []
            messages += [block.message() for block in run if isinstance(block, ToolResultBlock)]
        return messages


class AssistantMessage(Body):
    """An earlier reply. The texts of its blocks are joined to the original text. A result of a tool
    divides it into several messages."""

    role: Literal["assistant"]
    content: Annotated[
        AssistantBlocks,
        BeforeValidator(_assistant_blocks, json_schema_input_type=str | SentReplyBlocks),
    ]

    def messages(self) -> list[Message]:
        messages: list[Message] = []
        for are_results, blocks in groupby(
            self.content, key=lambda block: isinstance(block, ToolResultBlock)
        ):
            run = list(blocks)
            if are_results:
                messages += [block.message() for block in run if isinstance(block, ToolResultBlock)]
            else:
                messages.append(_reply(run))
        return messages or [_reply([])]


def _reply(blocks: Sequence[SentReplyBlock | ToolResultBlock]) -> Message:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=[block.call() for block in blocks if isinstance(block, ToolUseBlock)],
    )


class SystemMessage(Body):
    role: Literal["system"]
    content: Texts

    def messages(self) -> list[Message]:
        return [Message(role="system", content=_lines(self.content))]


class ToolDefinition(Body):
    """`input_schema`: a JSON schema of an object."""

    IGNORED = frozenset(
        {"allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "strict"}
    )

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None

    @field_validator("input_schema")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type", "object") != "object":
            raise RequestError(
                ErrorKind.INVALID, "input_schema must be the JSON schema of an object"
            )
        return schema

    def for_chat(self) -> ChatTool:
        """The tool in OpenAI's form. It is already checked, and its name may be longer than
        OpenAI's limit."""
        about = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
        }
        given: dict[str, Any] = {name: value for name, value in about.items() if value is not None}
        return ChatTool.model_construct(type="function", function=Function.model_construct(**given))


def _own_tools(tools: Any) -> Any:
    """Raises RequestError for a tool that Anthropic's servers run, or with a schema that only
    Anthropic's models know."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise RequestError(
                ErrorKind.INVALID, f"tools of type {tool['type']} are not supported by this server"
            )
    return tools


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> Literal["none", "auto", "required"] | NamedTool:
        """The choice in OpenAI's form."""
        match self.type:
            case "tool":
                function = FunctionName.model_construct(name=self.name)
                return NamedTool.model_construct(type="function", function=function)
            case "any":
                return "required"
        return self.type


class Metadata(Body):
    user_id: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: NonEmpty | None = None
    format: OutputFormat | None = None


def _check_last(messages: Sequence[Body]) -> None:
    """Raises RequestError (INVALID) if no reply can follow the messages, or go on from the last."""
    if not messages:
        raise RequestError(ErrorKind.INVALID, "no message has a text", "messages")
    if isinstance(messages[-1], AssistantMessage):
        check_continued(messages[-1].messages(), add_generation_prompt=False)


class PromptBody(Body):
    """POST /v1/messages/count_tokens: the model's input."""

    IGNORED = frozenset(
        {
            "betas",
            "context_management",
            "diagnostics",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    NEUTRAL: ClassVar = {
        "mcp_servers": ([],),
        "conversation": (),
        "history": ("client",),
        "on_disconnect": ("discard",),
    }

    model: NonEmpty
    messages: Annotated[
        list[
            Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
        ],
        BeforeValidator(few_calls),
        Field(min_length=1, max_length=MOST_MESSAGES),
    ]
    system: Texts = Field(default_factory=list)
    tools: Annotated[
        list[ToolDefinition],
        BeforeValidator(_own_tools, json_schema_input_type=list[ToolDefinition]),
    ] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _can_be_followed(self) -> PromptBody:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError(ErrorKind.INVALID, "tools must each have a name of its own", "tools")
        if self.tool_choice.type == "tool" and self.tool_choice.name not in names:
            raise RequestError(
                ErrorKind.INVALID,
                f"tool_choice names {self.tool_choice.name!r}, no tool",
                "tool_choice",
            )
        if self.tool_choice.type == "any" and not names:
            raise RequestError(ErrorKind.INVALID, "tool_choice requires tools", "tool_choice")
        _check_last(self.messages)
        return self

    def without_tokens_left(self) -> Self:
        """Returns the body without TOKENS_LEFT in system texts: this body if there is none. The
        marks of blocks that vanish become the body's own."""
        system = _without_tokens_left(self.system)
        messages: list[UserMessage | AssistantMessage | SystemMessage] = []
        for message in self.messages:
            if not isinstance(message, SystemMessage):
                messages.append(message)
                continue
            content = _without_tokens_left(message.content)
            if content == message.content:
                messages.append(message)
            elif content:
                messages.append(message.model_copy(update={"content": content}))
        if system == self.system and messages == self.messages:
            return self
        _check_last(messages)
        contents = [one.content for one in self.messages if isinstance(one, SystemMessage)]
        blocks = [block for content in (self.system, *contents) for block in content]
        marks = [self.cache_control, *(block.cache_control for block in blocks)]
        given = [mark for mark in marks if mark is not None]
        longest = max(given, key=lambda mark: KEEP_S[mark.ttl], default=None)
        update = {"system": system, "messages": messages, "cache_control": longest}
        return self.model_copy(update=update)

    def generate(self) -> Generate:
        """Returns the body's wishes for the engine."""
        texts = [text for block in self.system if (text := _without_billing(block.text))]
        first = [Message(role="system", content="\n".join(texts))] if texts else []
        messages = [message for given in self.messages for message in given.messages()]
        continued = isinstance(self.messages[-1], AssistantMessage)
        thinking = self.thinking
        effort = self.output_config.effort if self.output_config is not None else None
        wanted = thinking.wanted if thinking is not None else None
        return Generate(
            **dialogue([*first, *messages], *self._tools()),
            template_variables=with_thinking({}, wanted, EFFORTS.get(effort or "", effort)),
            add_generation_prompt=not continued,
            continue_final_message=continued,
            thought_budget=thinking.budget_tokens if thinking is not None else None,
        )

    def _tools(self) -> tuple[list[ChatTool], str | NamedTool, bool]:
        """The tools, the choice among them, and whether a reply may call several."""
        return (
            [tool.for_chat() for tool in self.tools],
            self.tool_choice.for_chat(),
            not self.tool_choice.disable_parallel_tool_use,
        )


class MessageBody(PromptBody):
    """POST /v1/messages."""

    NEUTRAL: ClassVar = {**PromptBody.NEUTRAL, "container": ()}
    OWN = GenerationBody.OWN

    max_tokens: int
    metadata: Metadata | None = None
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=MOST_STOPS)] = Field(
        default_factory=list
    )
    session_id: ConversationId | None = None
    prompt_cache_key: Affinity | None = None
    conversation_params: ConversationParams | None = None
    cache_salt: NonEmpty | None = None
    priority: int = 0
    expect_next_s: Wait | None = None
    return_sources: bool = False
    bad_words: BadWords = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def keep_s(self) -> float | None:
        """Seconds for which the prompt should be kept: the longest time of its markers."""
        contents = (block for message in self.messages for block in message.content)
        marks = [
            getattr(part, "cache_control", None)
            for part in (self, *self.system, *self.tools, *contents)
        ]
        return max((KEEP_S[mark.ttl] for mark in marks if mark is not None), default=None)

    def generate(self) -> Generate:
        """Returns the body's wishes for the engine. It is already checked: limits that only OpenAI
        has do not apply."""
        user = self.metadata.user_id if self.metadata is not None else None
        in_user = _session_in(user) if user is not None else None
        wanted = self.output_config.format if self.output_config is not None else None
        response_format = None
        if wanted is not None:
            response_format = ResponseFormat(
                type="json_schema", json_schema={"schema": wanted.schema_}
            )
        return replace(
            super().generate(),
            default_limit=self.max_tokens,
            stops=tuple(self.stop_sequences),
            bad_words=tuple(self.bad_words),
            stream=self.stream,
            form=reply_form(response_format, {}, *self._tools(), "output_config.format"),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            session=named_session(self.session_id, self.conversation_params),
            cache_salt=self.cache_salt,
            priority=self.priority,
            expect_next_s=self.expect_next_s,
            affinity=in_user or self.prompt_cache_key,
            several_dialogues=True,
            keep_s=self.keep_s,
        )

    def writer(self, model: str, tokenizer: Tokenizer | None) -> MessageWriter:
        """Returns the writer of the answer of `model`."""
        style = Style(model, False, False, self.return_sources)
        return MessageWriter(style, self.max_tokens)


def _session_in(user_id: str) -> str | None:
    """From `{"session_id": NAME, ...}`, or in older versions `..._session_NAME`. A name that cannot
    be a session's is none."""
    try:
        fields = json.loads(user_id)
    except (ValueError, RecursionError):
        fields = {"session_id": user_id.partition("_session_")[2]}
    name = fields.get("session_id") if isinstance(fields, dict) else None
    if not isinstance(name, str) or len(name) > LONGEST_SESSION or name != _sendable(name):
        return None
    return name or None


def _sendable(text: str) -> str:
    """Halves of surrogate pairs, which an escape of JSON can make, become question marks."""
    return text.encode(errors="replace").decode()
