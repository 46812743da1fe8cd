"""`Generate`: a checked request to generate replies, equal for the bodies of all APIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...scheduler.types import ErrorKind, RequestError
from ..conversations.transcript import Message
from ..text.tokenizer import ChatTemplate
from .structured_output import ReplyForm


@dataclass(frozen=True)
class Generate:
    """A body's wishes for the engine and the histories. The form of its answer is not here but in
    its writer.

    prompt             of a completion: text, token ids, or several of either; None: of a chat
    messages, tools, template_variables
                       of a chat, as the client sent them
    template           of a chat, None: the model's own
    add_generation_prompt, continue_final_message
                       where the prompt of a chat ends: in front of the next message, behind the
                       last one, or inside it
    prompt_field       the body's field that contains the prompt or the messages, for errors

    conversation_id    the conversation that the turn is stored in
    server_history     the prompt or the messages continue the stored conversation
    stores_partial     if the client hangs up, the reply ends and its turn is stored
    response           the history is that of the Responses API: `previous`, or the conversation
    previous           the id of the response that this one continues
    instructions       messages in front of the dialogue, which are not remembered
    store              the reply is stored as a response

    n                  replies to each prompt
    limit, limit_field the body's limit of a reply's tokens, None for none, and its field
    default_limit      the limit if the body has none, None for the context's
                       (limits are lowered to the room in the context)
    truncates          the context may outgrow the model's length
    stops, stop_token_ids, include_stop, ignore_eos, min_tokens
                       the end of a reply
    bad_words          words that a reply must not contain
    form               the form that a reply must have, None for any
    most_tool_calls    the most tool calls that a reply may contain
    callable_names     the only tools that a reply may call, None for any
    thought_budget, budget_field
                       the most tokens of a thought, None for any number, and its field
    remarks            fields that have no effect with this model
    logprobs, prompt_logprobs
                       number of likeliest tokens reported with each token of the reply, of the
                       prompt
    echo               the prompt's text precedes a reply's
    stream             the replies are delivered while they grow

    temperature, top_p, top_k, min_p, repetition_penalty
                       None: the server's defaults (`Ready.sampling`)

    session            the name that groups requests whose KV belongs together
    affinity           the same, if neither `session` nor a header names one
    several_dialogues  dialogues of `session` are told apart by their beginnings; those of a session
                       that is named elsewhere always are
    keep_s             seconds from the reply's end for which the session's KV is evicted last

    The other fields are those of `Request` and `Sampling` before their checks.
    """

    prompt: str | list[Any] | None = None
    messages: tuple[Message, ...] = ()
    template: ChatTemplate | None = None
    tools: tuple[dict[str, Any], ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    prompt_field: str = "prompt"

    conversation_id: str | None = None
    server_history: bool = False
    stores_partial: bool = False
    response: bool = False
    previous: str | None = None
    instructions: tuple[Message, ...] = ()
    store: bool = False

    n: int = 1
    limit: int | None = None
    limit_field: str = "max_tokens"
    default_limit: int | None = None
    truncates: bool = False
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[str, ...] = ()
    form: ReplyForm | None = None
    most_tool_calls: int = 0
    callable_names: frozenset[str] | None = None
    thought_budget: int | None = None
    budget_field: str = "thinking.budget_tokens"
    remarks: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    stream: bool = False

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None

    session: str | None = None
    affinity: str | None = None
    several_dialogues: bool = False
    keep_s: float | None = None
    cache_salt: str | None = None
    priority: int = 0
    expect_next_s: float | None = None

    @property
    def chat(self) -> bool:
        """True if a template renders the prompt, and the reply is a message."""
        return self.prompt is None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of a completion, none of a chat. Raises RequestError for other forms."""
        prompt = self.prompt
        if prompt is None:
            return []
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        if not prompt or [] in prompt or "" in prompt:
            raise RequestError(ErrorKind.INVALID, "the prompt is empty", "prompt")
        if kinds == {str} or (
            kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt)
        ):
            return prompt
        forms = "text, a list of token ids, or a list of several of one of these"
        raise RequestError(ErrorKind.INVALID, f"prompt: must be {forms}", "prompt")
