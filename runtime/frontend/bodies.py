"""Bodies of the OpenAI-compatible requests. Each known field either has its effect or is refused by
name.

Types are strict (a string with a number is not a number). `null` has the same effect as an absent
field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ...scheduler.types import ErrorKind, RequestError, check_logprobs
from ..text.tokenizer import Tokenizer
from .body_base import Affinity, Body, ConversationId, NonEmpty, with_whole_pairs
from .chat_messages import (
    MOST_MESSAGES,
    AllowedFunctionsChoice,
    ChosenFunctions,
    Message,
    NamedTool,
    TemplateVariables,
    Thinking,
    Tool,
    few_calls,
    with_thinking,
)
from .generate import Generate
from .logprobs import LogprobsWriter
from .reply import ChatWriter, CompletionWriter, Style
from .structured_output import GUIDED, ResponseFormat, StructuredOutputs, reply_form

MOST_CHOICES = MOST_TOOLS = 128  # OpenAI's limit
MOST_BAD_WORDS = 512  # those of one token are added to the logits in every step
LONGEST_BAD_WORD = 200  # characters
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default


Wait = Annotated[float, Field(ge=0.0, allow_inf_nan=False, strict=False)]  # seconds


def _check_bad_words(words: list[str]) -> list[str]:
    if len(words) > MOST_BAD_WORDS:
        raise RequestError(
            ErrorKind.INVALID, f"bad_words: at most {MOST_BAD_WORDS} are allowed, not {len(words)}"
        )
    for word in words:
        if not word.strip():
            raise RequestError(
                ErrorKind.INVALID, "bad_words: a word must have more than white space"
            )
        if len(word) > LONGEST_BAD_WORD:
            raise RequestError(
                ErrorKind.INVALID,
                f"bad_words: a word may have {LONGEST_BAD_WORD} characters, not {len(word)}",
            )
    return words


BadWords = Annotated[list[str], AfterValidator(_check_bad_words)]


class StreamOptions(Body):
    IGNORED = frozenset({"include_obfuscation"})
    NEUTRAL: ClassVar = {"continuous_usage_stats": (False,)}

    include_usage: bool = False


class ConversationName(Body):
    id: ConversationId


class ConversationParams(Body):
    conversation_id: ConversationId


def named_session(session: str | None, params: ConversationParams | None) -> str | None:
    """The session that a body names in one of two ways."""
    return params.conversation_id if session is None and params is not None else session


class GenerationBody(Body):
    """The fields that all generating endpoints share."""

    OWN = frozenset(
        {
            "cache_salt",
            "conversation",
            "conversation_params",
            "expect_next_s",
            "history",
            "on_disconnect",
            "priority",
            "return_sources",
            "session_id",
        }
    )
    IGNORED = frozenset(
        {
            # OpenAI's fields
            "metadata",
            "prediction",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
            # vLLM's fields
            "guided_decoding_backend",
            "include_reasoning",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "request_id",
            "return_mm_kwargs",
            "return_token_offsets",
            "routed_experts_prompt_start",
            "stream_interval",
            "truncation_side",
        }
    )
    NEUTRAL: ClassVar = {
        "allowed_token_ids": (),
        "ec_transfer_params": ({},),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "moderation": (),
        "repetition_detection": (),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "thinking_token_budget": (-1,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    bad_words: BadWords = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_sources: bool = False
    priority: int = 0
    expect_next_s: Wait | None = None
    conversation: ConversationId | ConversationName | None = None
    conversation_params: ConversationParams | None = None
    session_id: ConversationId | None = None
    prompt_cache_key: Affinity | None = None
    history: Literal["client", "server"] = "client"
    on_disconnect: Literal["discard", "store"] = "discard"
    cache_salt: NonEmpty | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops_none_empty(cls, stop: str | list[str]) -> str | list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > 16:
            raise RequestError(
                ErrorKind.INVALID, f"at most 16 stop strings are allowed, not {len(stops)}"
            )
        if "" in stops:
            raise RequestError(ErrorKind.INVALID, "a stop string must not be empty")
        return stops

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                ErrorKind.INVALID, "stream_options is allowed only with stream", "stream_options"
            )
        if self.server_history and self.conversation_id is None:
            raise RequestError(
                ErrorKind.INVALID,
                "history is kept by the server for a named conversation only",
                "history",
            )
        if self.on_disconnect == "store" and not (self.stream and self.conversation_id is not None):
            raise RequestError(
                ErrorKind.INVALID,
                "on_disconnect: store is allowed only with stream and a conversation",
                "on_disconnect",
            )
        return self

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation that the turn is stored in, or None."""
        return (
            self.conversation.id
            if isinstance(self.conversation, ConversationName)
            else self.conversation
        )

    @property
    def session(self) -> str | None:
        """The name that groups requests whose KV belongs together, or None. Nothing is stored under
        it."""
        return named_session(self.session_id, self.conversation_params)

    @property
    def server_history(self) -> bool:
        """True if the body contains only new messages; the server has the earlier ones."""
        return self.history == "server"

    @property
    def truncates(self) -> bool:
        """True if the context may outgrow the model's length: by default, if the turn belongs to a
        conversation."""
        return (
            self.conversation_id is not None
            if self.truncation is None
            else self.truncation == "auto"
        )

    def generate(self) -> Generate:
        """Returns the body's wishes for the engine. Raises RequestError if the requested form of
        the reply cannot be followed."""
        return Generate(
            conversation_id=self.conversation_id,
            server_history=self.server_history,
            stores_partial=self.on_disconnect == "store",
            limit=self.max_tokens,
            truncates=self.truncates,
            stops=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            bad_words=tuple(self.bad_words),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            session=self.session,
            affinity=self.prompt_cache_key,
            cache_salt=self.cache_salt,
            priority=self.priority,
            expect_next_s=self.expect_next_s,
        )


class ChoicesBody(GenerationBody):
    """The fields that completions and chat completions share."""

    WRITER: ClassVar = CompletionWriter

    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | NonEmpty | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    guided_grammar: NonEmpty | None = None

    @model_validator(mode="after")
    def _choices_and_prompt_logprobs(self) -> ChoicesBody:
        if not 1 <= self.n <= MOST_CHOICES:
            raise RequestError(
                ErrorKind.INVALID, f"n must be between 1 and {MOST_CHOICES}, not {self.n}", "n"
            )
        if self.best_of not in (None, self.n):
            raise RequestError(
                ErrorKind.INVALID,
                f"best_of is supported only if it equals n, which is {self.n}",
                "best_of",
            )
        if self.on_disconnect == "store" and self.n > 1:
            raise RequestError(
                ErrorKind.INVALID,
                "on_disconnect: store is allowed only with n = 1",
                "on_disconnect",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                ErrorKind.INVALID, "prompt_logprobs is not supported with stream", "prompt_logprobs"
            )
        return self

    @property
    def reply_logprobs(self) -> int | None:
        """The number of likeliest tokens reported with each token of the reply; None: no log
        probabilities."""
        raise NotImplementedError

    def constraints(self) -> dict[str, Any]:
        """The fields besides `response_format` that set the form of the reply, if they are set."""
        values = {name: getattr(self, name) for name in ("structured_outputs", *GUIDED)}
        return {name: value for name, value in values.items() if value is not None}

    def generate(self) -> Generate:
        """See `GenerationBody`."""
        check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        return replace(
            super().generate(),
            n=self.n,
            logprobs=self.reply_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def writer(self, model: str, tokenizer: Tokenizer | None) -> CompletionWriter:
        """Returns the writer of the answer of `model`."""
        logprobs = None
        if (self.reply_logprobs, self.prompt_logprobs) != (None, None):
            logprobs = LogprobsWriter(tokenizer, self.reply_logprobs, self.prompt_logprobs)
        style = Style(
            model,
            self.return_token_ids,
            self.stream_options is not None and self.stream_options.include_usage,
            self.return_sources,
            logprobs,
            isinstance(self, CompletionBody) and self.echo,
            not isinstance(self, ChatBody) or self.include_reasoning,
        )
        return self.WRITER(style)


class CompletionBody(ChoicesBody):
    """POST /v1/completions. `prompt`: text or token ids, or several of these;
    `Generate.prompts` checks it."""

    NEUTRAL: ClassVar = {
        **GenerationBody.NEUTRAL,
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _no_stream_of_prompt_logprobs(self) -> CompletionBody:
        if self.echo and self.stream and self.logprobs is not None:
            raise RequestError(
                ErrorKind.INVALID, "echo with logprobs is not supported with stream", "echo"
            )
        return self

    @property
    def reply_logprobs(self) -> int | None:
        return self.logprobs

    def generate(self) -> Generate:
        """See `GenerationBody`."""
        wishes = super().generate()
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return replace(
            wishes,
            prompt=self.prompt,
            default_limit=DEFAULT_COMPLETION_TOKENS,
            form=reply_form(self.response_format, self.constraints()),
            prompt_logprobs=prompt_logprobs,
            echo=self.echo,
        )


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions."""

    IGNORED = GenerationBody.IGNORED - {"include_reasoning"}
    WRITER: ClassVar = ChatWriter
    NEUTRAL: ClassVar = {
        **{k: v for k, v in GenerationBody.NEUTRAL.items() if k != "thinking_token_budget"},
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "return_prompt_text": (False,),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], BeforeValidator(few_calls)] = Field(
        min_length=1, max_length=MOST_MESSAGES
    )
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctions = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    reasoning_effort: NonEmpty | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _tools_and_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                ErrorKind.INVALID, "top_logprobs is allowed only with logprobs", "top_logprobs"
            )
        check_logprobs(self.top_logprobs, "top_logprobs")
        names = [tool.function.name for tool in self.tools]
        if len(names) > MOST_TOOLS or len(set(names)) < len(names):
            raise RequestError(
                ErrorKind.INVALID,
                f"tools must be at most {MOST_TOOLS}, each with a name of its own",
                "tools",
            )
        given = self.tool_choice
        chosen = [given.function.name] if isinstance(given, NamedTool) else []
        if isinstance(given, AllowedFunctionsChoice):
            chosen = [tool.function.name for tool in given.allowed_tools.tools]
        for name in chosen:
            if name not in names:
                raise RequestError(
                    ErrorKind.INVALID, f"tool_choice names {name!r}, no tool", "tool_choice"
                )
        callable_tools, choice = self._chosen()
        if choice == "required" and not callable_tools:
            raise RequestError(ErrorKind.INVALID, "tool_choice requires tools", "tool_choice")
        return self

    def _chosen(self) -> tuple[list[Tool], str | NamedTool]:
        """The tools that a reply may call, and the choice among them."""
        if not isinstance(self.tool_choice, AllowedFunctionsChoice):
            return self.tools, self.tool_choice
        allowed = self.tool_choice.allowed_tools
        names = {tool.function.name for tool in allowed.tools}
        return [tool for tool in self.tools if tool.function.name in names], allowed.mode

    @property
    def reply_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None: as it likes."""
        if self.enable_thinking is None and self.thinking is not None:
            return self.thinking.wanted
        return self.enable_thinking

    @property
    def thought_budget(self) -> int | None:
        """The most tokens of a thought, None for any number."""
        if self.thinking_token_budget is not None:
            return self.thinking_token_budget if self.thinking_token_budget >= 0 else None
        return self.thinking.budget_tokens if self.thinking is not None else None

    def generate(self) -> Generate:
        """See `GenerationBody`."""
        wishes = super().generate()
        callable_tools, choice = self._chosen()
        if len(callable_tools) < len(self.tools):
            names = frozenset(tool.function.name for tool in callable_tools)
            wishes = replace(wishes, callable_names=names)
        if self.max_completion_tokens is not None:
            wishes = replace(
                wishes, limit=self.max_completion_tokens, limit_field="max_completion_tokens"
            )
        return replace(
            wishes,
            **dialogue(self.messages, self.tools, choice, self.parallel_tool_calls),
            template_variables=with_thinking(
                self.chat_template_kwargs, self.thinks, self.reasoning_effort
            ),
            add_generation_prompt=self.add_generation_prompt is not False
            and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            thought_budget=self.thought_budget,
            budget_field="thinking.budget_tokens"
            if self.thinking_token_budget is None
            else "thinking_token_budget",
            form=reply_form(
                self.response_format,
                self.constraints(),
                callable_tools,
                choice,
                self.parallel_tool_calls,
            ),
        )

    @model_validator(mode="after")
    def _prompt_end(self) -> ChatBody:
        if self.continue_final_message:
            check_continued(self.messages, bool(self.add_generation_prompt))
        named = self.continue_final_message or self.add_generation_prompt is False
        if named and self.conversation_id is not None:
            field = "add_generation_prompt"
            if self.continue_final_message:
                field = "continue_final_message"
            raise RequestError(
                ErrorKind.INVALID, f"{field} is not supported in a stored conversation", field
            )
        return self

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                ErrorKind.INVALID, "max_tokens and max_completion_tokens differ", "max_tokens"
            )
        return self


def check_continued(messages: Sequence[Message], add_generation_prompt: bool) -> None:
    """Raises RequestError (INVALID) if the last message cannot be continued."""
    last = messages[-1] if messages else None
    if add_generation_prompt:
        raise RequestError(
            ErrorKind.INVALID,
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        raise RequestError(
            ErrorKind.INVALID,
            "continue_final_message needs a last message of the assistant with text",
            "messages",
        )


def dialogue(
    messages: Iterable[Message],
    tools: Sequence[Tool],
    tool_choice: str | NamedTool,
    parallel_tool_calls: bool,
) -> dict[str, Any]:
    """The fields of `Generate` for messages and tools that the model may call."""
    usable = tools if tool_choice != "none" else ()
    most_calls = MOST_TOOLS if parallel_tool_calls else 1
    return {
        "messages": tuple(message.for_template() for message in messages),
        "tools": tuple(tool.for_template() for tool in usable),
        "prompt_field": "messages",
        "most_tool_calls": most_calls if usable else 0,
    }


Kind = TypeVar("Kind", bound=Body)
NAMES = (
    "cache_salt",
    "conversation",
    "conversation_params",
    "id",
    "prompt_cache_key",
    "session_id",
)
"""Fields that tell conversations, or the KV of requests, apart."""


def parse(kind: type[Kind], body: bytes, ignored: list[str] | None = None) -> Kind:
    """Returns the body as this kind of request. Raises RequestError (INVALID) that names the field.
    Texts get U+FFFD in the place of each half of a surrogate pair. Names with a half are refused,
    because two of them would become one.

    `ignored` gets the names of unknown fields; None: they are refused. A body of the largest
    allowed size takes seconds, so do not call this in the thread of an event loop.
    """
    try:
        return kind.model_validate_json(body, context=ignored)
    except ValidationError as error:
        is_json = error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid"
        if is_json or (whole := with_whole_pairs(body)) == body:
            raise _request_error(error) from error
    parsed = parse(kind, whole, ignored)
    for name in NAMES:
        if "\ufffd" in str(getattr(parsed, name, "")):
            raise RequestError(
                ErrorKind.INVALID, f"{name} has half of a surrogate pair, not a character", name
            )
    return parsed


def _request_error(error: ValidationError) -> RequestError:
    """An error for the first field at fault, with all its faults (a union reports one for each of
    its members)."""
    faults = error.errors(include_url=False)
    for fault in faults:
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, RequestError):
            # "list[Item]": a member of a union
            place = [str(part) for part in fault["loc"] if "[" not in str(part)]
            names = place if cause.subject is None else [*place, cause.subject]
            return RequestError(cause.kind, cause.message, ".".join(names))
    place = [str(part) for part in faults[0]["loc"]]
    if not place:
        return RequestError(ErrorKind.INVALID, f"the body is not a JSON object: {faults[0]['msg']}")
    messages = list(dict.fromkeys(fault["msg"] for fault in faults if fault["loc"][0] == place[0]))
    if len(messages) > 1:  # of a union, a longer place would name one of its members
        places = [fault["loc"] for fault in faults if fault["loc"][0] == place[0]]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*places, strict=False))
        place = [str(parts[0]) for parts in common]
    where = ".".join(place)
    return RequestError(ErrorKind.INVALID, f"{where}: {'; '.join(messages)}", place[0])
