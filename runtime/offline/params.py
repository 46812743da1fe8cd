"""Sampling parameters of the offline API, with vLLM's names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ...scheduler.types import ErrorKind, RequestError, Sampling
from ..frontend.bodies import ChatBody, CompletionBody, parse


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of replies; fields and meanings are vLLM's. RequestError (a ValueError)
    names a wrong field.

    n                   replies to each prompt
    max_tokens          most tokens of a reply; None: up to the end of the context
    temperature         0 is greedy
    logprobs, prompt_logprobs
                        number of likeliest tokens reported with each token of the reply, of the
                        prompt
    skip_special_tokens only True
    bad_words           words that a reply must not contain
    structured_outputs  one of json, json_object, regex, choice, grammar, as in the HTTP API
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    bad_words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        body_of(CompletionBody, self, prompt="checked")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(
                ErrorKind.INVALID,
                f"max_tokens must be at least 1, not {self.max_tokens}",
                "max_tokens",
            )
        Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
        )


def body_of(kind: type[Any], params: SamplingParams, **fields: Any) -> Any:
    """Returns the HTTP API's body for the same request. `fields` add to the parameters or replace
    them."""
    values = asdict(params) | fields
    if kind is ChatBody:
        values |= {"logprobs": params.logprobs is not None, "top_logprobs": params.logprobs}
    return parse(kind, json.dumps(values).encode())
