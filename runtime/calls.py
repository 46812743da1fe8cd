"""From a checked body to requests for the engine: tokenised, with limits and defaults resolved."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..scheduler.types import Request, RequestError, RequestId, Sampling
from .api_types import ChatBody, CompletionBody, GenerationBody
from .messages import Ready
from .replies import ChatWriter, CompletionWriter, Style
from .text import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Call:
    """A checked HTTP call: `requests` differ in their prompt only."""

    requests: tuple[Request, ...]
    writer: CompletionWriter
    stream: bool
    chat: bool
    stops: tuple[str, ...]
    include_stop: bool
    arrived: float


class CallMaker:
    """Turns bodies into calls for the engine that `ready` describes."""

    def __init__(self, ready: Ready, tokenizer: Tokenizer | None, new_id: Callable[[], RequestId]):
        self._ready, self._tokenizer, self._new_id = ready, tokenizer, new_id

    async def completion(self, body: CompletionBody, arrived: float) -> Call:
        self._check_model(body)
        prompts = [await self._prompt(prompt) for prompt in _one_or_several(body.prompt)]
        style = Style(self._ready.model, body.return_token_ids, body.include_usage)
        return self._call(body, prompts, CompletionWriter(style), body.max_tokens, DEFAULT_COMPLETION_TOKENS, arrived)

    async def chat(self, body: ChatBody, arrived: float) -> Call:
        self._check_model(body)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(self._need_tokenizer("messages").encode_chat, messages)
        style = Style(self._ready.model, body.return_token_ids, body.include_usage)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return self._call(body, [prompt], ChatWriter(style), limit, self._ready.max_model_len, arrived)

    def _check_model(self, body: GenerationBody) -> None:
        if body.model not in (None, self._ready.model):
            raise RequestError(400, f"model {body.model!r} is not served here; {self._ready.model!r} is", "model")

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(400, "this engine has no tokenizer: send token ids to /v1/completions", param)
        return self._tokenizer

    async def _prompt(self, prompt: str | list[int]) -> array[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(400, "the prompt is empty", "prompt")
            return await asyncio.to_thread(self._need_tokenizer("prompt").encode, prompt)
        self._check_ids(prompt, "prompt")
        return array("i", prompt)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._ready.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(
                400, f"{param}: token ids are from 0 to {self._ready.vocab_size - 1}, not {wrong}", param
            )

    def _call(
        self,
        body: GenerationBody,
        prompts: Sequence[array[int]],
        writer: CompletionWriter,
        limit: int | None,
        default: int,
        arrived: float,
    ) -> Call:
        """`limit`: most tokens to generate as the body has it; `default`: if it has none and the context leaves it."""
        conversation = body.conversation_id
        if conversation is not None and len(prompts) > 1:
            raise RequestError(400, "a conversation takes one prompt at a time", "prompt")
        if body.stop:
            self._need_tokenizer("stop")
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        stop_ids = frozenset(body.stop_token_ids) | frozenset(() if body.ignore_eos else self._ready.stop_ids)
        sampling = self._sampling(body)
        requests = [
            Request(
                id=self._new_id(),
                prompt=prompt,
                max_tokens=self._max_tokens(len(prompt), limit, default),
                conversation=conversation,
                min_tokens=body.min_tokens,
                stop_ids=stop_ids,
                sampling=sampling,
                confirm=bool(body.stop),
            )
            for prompt in prompts
        ]
        return Call(
            requests=tuple(requests),
            writer=writer,
            stream=body.stream,
            chat=isinstance(body, ChatBody),
            stops=tuple(body.stop),
            include_stop=body.include_stop_str_in_output,
            arrived=arrived,
        )

    def _max_tokens(self, prompt: int, limit: int | None, default: int) -> int:
        """Tokens to generate behind a prompt of `prompt` tokens."""
        context = self._ready.max_model_len
        if prompt >= context:
            raise RequestError(
                400, f"the prompt has {prompt} tokens; the model's context holds {context}, reply included", "prompt"
            )
        if limit is None:
            return min(default, context - prompt)
        if prompt + limit > context:
            raise RequestError(
                400,
                f"the prompt has {prompt} tokens and max_tokens is {limit}, together {prompt + limit}; "
                f"the model's context holds {context}",
                "max_tokens",
            )
        return limit

    def _sampling(self, body: GenerationBody) -> Sampling:
        """-1 is another way to say that top-k is off, as is anything from the vocabulary's size on."""
        top_k = 0 if body.top_k == -1 or body.top_k >= self._ready.vocab_size else body.top_k
        seed = random.getrandbits(63) if body.seed is None else body.seed
        return Sampling(body.temperature, top_k, body.top_p, seed)


def _one_or_several(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts in OpenAI's four forms: text, token ids, several of either."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if not prompt or [] in prompt or "" in prompt:
        raise RequestError(400, "the prompt is empty", "prompt")
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in prompt)):
        return prompt
    raise RequestError(400, "prompt: must be text, a list of token ids, or a list of several of one of these", "prompt")
