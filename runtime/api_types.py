"""The bodies of the OpenAI-compatible requests. What they ask for is either done, or refused by name.

Types are strict (no number in a string is a number); `null` asks for nothing, as if the field were absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from ..scheduler.types import RequestError

NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class Body(BaseModel):
    """A JSON object that refuses what it does not know."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Accepted: has no effect on what this server does, whatever its value."""
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Not supported: accepted with these values, which ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.IGNORED:
                continue
            if name in cls.NEUTRAL:
                if value not in cls.NEUTRAL[name]:
                    raise RequestError(400, f"{name} is not supported by this server", name)
                continue
            if name not in cls.model_fields:
                raise RequestError(400, f"{name} is not a field that this server knows", name)
            kept[name] = value
        return kept


class StreamOptions(Body):
    IGNORED = frozenset({"include_obfuscation"})
    NEUTRAL: ClassVar = {"continuous_usage_stats": (False,)}

    include_usage: bool = False


class ConversationName(Body):
    id: NonEmpty


class ConversationParams(Body):
    conversation_id: NonEmpty


class GenerationBody(Body):
    """What the two endpoints have in common."""

    IGNORED = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
        }
    )
    NEUTRAL: ClassVar = {
        "n": (1,),
        "best_of": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
        "logprobs": (False,),
        "prompt_logprobs": (),
        "use_beam_search": (False,),
        "echo": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "response_format": ({"type": "text"},),
    }

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    conversation: NonEmpty | ConversationName | None = None
    conversation_params: ConversationParams | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops_none_empty(cls, stop: str | list[str]) -> str | list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > 16:
            raise RequestError(400, f"at most 16 stop strings are allowed, not {len(stops)}")
        if "" in stops:
            raise RequestError(400, "a stop string must not be empty")
        return stops

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError(400, "stream_options is allowed only with stream", "stream_options")
        named, params = self._named(), self.conversation_params
        if named is not None and params is not None and named != params.conversation_id:
            raise RequestError(
                400, "conversation and conversation_params name different conversations", "conversation_params"
            )
        return self

    def _named(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def conversation_id(self) -> str | None:
        return self.conversation_params.conversation_id if self.conversation_params is not None else self._named()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt`: text or token ids, or several of these; looked at in openai_api."""

    NEUTRAL: ClassVar = {**GenerationBody.NEUTRAL, "logprobs": (), "suffix": ("",), "add_special_tokens": (True,)}

    prompt: str | list[Any]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a dialogue; its other fields are those of a reply sent back as it came."""

    NEUTRAL: ClassVar = {"refusal": (), "annotations": ([],), "tool_calls": ([],), "audio": (), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar = {
        **GenerationBody.NEUTRAL,
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(400, "max_tokens and max_completion_tokens differ", "max_tokens")
        return self


Kind = TypeVar("Kind", bound=GenerationBody)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The body as this kind of request. Raises RequestError (400) that names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    """The first field at fault, with all that is wrong with it (a union reports once for each of its members)."""
    faults = error.errors(include_url=False)
    place = [str(part) for part in faults[0]["loc"]]
    cause = faults[0].get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        names = place if cause.param is None else [*place, cause.param]
        return RequestError(cause.status, cause.message, ".".join(names))
    if not place:
        return RequestError(400, f"the body is not a JSON object: {faults[0]['msg']}")
    messages = list(dict.fromkeys(fault["msg"] for fault in faults if fault["loc"][0] == place[0]))
    where = ".".join(place) if len(messages) == 1 else place[0]  # a longer place would name one member of the union
    return RequestError(400, f"{where}: {'; '.join(messages)}", place[0])
