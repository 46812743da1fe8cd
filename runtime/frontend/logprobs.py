"""Log probabilities in the forms of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...scheduler.types import TokenLogprobs
from ..text.tokenizer import Detokenizer, Tokenizer

LEAST = -9999.0  # replaces minus infinity, which JSON does not have


class LogprobsWriter:
    """`top`: number of likeliest tokens to report; None: no log probabilities of the reply."""

    def __init__(self, tokenizer: Tokenizer | None, top: int | None, prompt_top: int | None):
        self._tokenizer = tokenizer
        self.top = top
        self.prompt_top = prompt_top

    def chat(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A chat choice's `logprobs`: an entry for each token id of the reply, special tokens
        without bytes."""
        content = [
            {
                **self._entry(token, entry.logprob),
                "top_logprobs": [self._entry(*pair) for pair in _top(entry, self.top)],
            }
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, list[Any]]:
        """A completion choice's `logprobs`; None stands for a prompt's first token, which has no
        probability."""
        tops = [
            self._by_text(((token, entry.logprob), *_top(entry, self.top)))
            if entry is not None
            else None
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return {
            "text_offset": list(offsets),
            "token_logprobs": [
                None if entry is None else _finite(entry.logprob) for entry in entries
            ],
            "tokens": [self._text(token) for token in tokens],
            "top_logprobs": tops,
        }

    def _by_text(self, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with equal text (such as bytes of unfinished characters) the first one
        counts."""
        by_text: dict[str, float] = {}
        for token, logprob in pairs:
            by_text.setdefault(self._text(token), _finite(logprob))
        return by_text

    def offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """The place in the text at which each token begins."""
        if self._tokenizer is None:
            return [0] * len(tokens)
        ids, places = self._tokenizer.encode_with_places(text)
        if ids == list(tokens):
            return places
        detokenizer = Detokenizer(self._tokenizer)
        length = 0
        offsets = []
        # for example of a conversation: the model may have used other tokens for this text
        for token in tokens:
            offsets.append(length)
            text_piece = detokenizer.push(token)
            written = self._tokenizer.written(token)
            length += (
                len(written) if written and text.startswith(written, length) else len(text_piece)
            )
        return offsets

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token but the first, tokens by id."""
        listed: list[dict[str, Any] | None] = [None]
        for token, entry in zip(prompt[1:], entries, strict=True):
            ranked = [
                (own, logprob, rank)
                for rank, (own, logprob) in enumerate(_top(entry, self.prompt_top), 1)
            ]
            listed.append(
                {
                    str(own): {
                        "logprob": _finite(logprob),
                        "rank": rank,
                        "decoded_token": self._text(own),
                    }
                    for own, logprob, rank in ((token, entry.logprob, entry.rank), *ranked)
                }
            )
        return listed

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        tokenizer = self._tokenizer
        special = tokenizer is None or token in tokenizer.special
        raw = None if special or tokenizer is None else list(tokenizer.token_bytes(token))
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}

    def _text(self, token: int) -> str:
        """The token's text; its id if there is no tokenizer or the token has no text."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        return (
            self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")
            or f"token_id:{token}"
        )


def _top(entry: TokenLogprobs, top: int | None) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)) if top else []


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
