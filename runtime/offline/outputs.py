"""The offline API's outputs, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...scheduler.types import TokenLogprobs, Usage
from ..frontend.reply import Reply
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """A token's log probability; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One reply so far. `finish_reason` None: it is not finished. `stop_reason`: the stop string or
    the id in `stop_token_ids` that ended it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its replies. `usage`: the sources of the KV of the prompt's tokens;
    `num_cached_tokens`: those not computed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage

    @property
    def num_cached_tokens(self) -> int:
        return self.usage.cached


def request_output(
    number: int, prompt: str | None, replies: Sequence[Reply], tokenizer: Tokenizer | None
) -> RequestOutput:
    """Returns the replies to one prompt so far. number: the prompt's, among those of one call."""
    first = replies[0]
    request = first.request
    ids = request.prompt.tolist()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    if request.prompt_logprobs is not None:
        prompt_logprobs = [None, *_logprobs(ids[1:], first.prompt_logprobs, tokenizer)]
    return RequestOutput(
        request_id=str(number),
        prompt=prompt,
        prompt_token_ids=ids,
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(index, reply, tokenizer) for index, reply in enumerate(replies)],
        finished=all(reply.finish is not None for reply in replies),
        usage=first.sources,
    )


def _completion(index: int, reply: Reply, tokenizer: Tokenizer | None) -> CompletionOutput:
    scored = reply.request.sampling.logprobs is not None
    return CompletionOutput(
        index=index,
        text="".join(reply.texts),
        token_ids=list(reply.tokens),
        logprobs=_logprobs(reply.tokens, reply.logprobs, tokenizer) if scored else None,
        finish_reason=None if reply.reason is None else str(reply.reason),
        stop_reason=reply.stop_reason,
    )


def _logprobs(
    tokens: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    named = []
    for token, entry in zip(tokens, entries, strict=False):
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        likeliest = {other: (logprob, rank) for rank, (other, logprob) in enumerate(top, 1)}
        named.append(
            {
                other: Logprob(logprob, rank, tokenizer.decode([other]) if tokenizer else None)
                for other, (logprob, rank) in (
                    {token: (entry.logprob, entry.rank)} | likeliest
                ).items()
            }
        )
    return named
