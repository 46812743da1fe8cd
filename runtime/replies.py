"""A reply as it grows, and how it is written: OpenAI's completion and chat objects, whole or as a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..scheduler.types import FinishReason, Output, Request, RequestError
from .engine_client import OutputStream
from .text import Detokenizer, StopMatcher, Tokenizer

CONTEXT_TOKENS = 8  # tokens of a prompt that can change how the reply's first token reads

_encode_text = json.JSONEncoder().encode


class Piece(NamedTuple):
    """What one output adds to a reply."""

    text: str
    tokens: tuple[int, ...]


class Reply:
    """Turns one request's outputs into text, ends it at a stop string, and confirms its length where that is asked."""

    def __init__(
        self,
        request: Request,
        stream: OutputStream,
        tokenizer: Tokenizer | None,
        matcher: StopMatcher | None = None,
        *,
        continues_prompt: bool,
        include_stop: bool = False,
    ):
        """`matcher` needs a tokenizer and a request with `confirm`.

        `continues_prompt`: the text is read as the prompt's continuation (a leading space stays), not on its own.
        `include_stop`: the text of a stop token stays, unless it is a special token.
        """
        context = request.prompt[-CONTEXT_TOKENS:] if continues_prompt else ()
        self.request = request
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.cached = 0
        self.finish: FinishReason | None = None
        self._stream = stream
        self._detokenizer = Detokenizer(tokenizer, context) if tokenizer is not None else None
        self._matcher = matcher
        self._include_stop = include_stop

    def add(self, output: Output) -> Piece:
        """Takes an output, returns what is to be said of it: nothing behind a stop string.

        Raises RequestError (503) if the engine aborted the request.
        """
        if output.finish is FinishReason.ABORT:
            raise RequestError(503, "the server is shutting down and has ended this request")
        if output.usage is not None:
            self.cached = output.usage.cached
        stopped = self._stopped
        tokens, text = ((), "") if stopped else self._read(output)
        self.tokens += tokens
        self.texts.append(text)
        if output.finish is not None:
            self.finish = FinishReason.STOP if self._stopped else output.finish
        if self.request.confirm and not stopped and (self._stopped or output.finish is not None):
            self._stream.finish(self.request.id, len(self.tokens))
        return Piece(text, tokens)

    @property
    def _stopped(self) -> bool:
        """A stop string is complete. The engine may still be running on; its last output is waited for."""
        return self._matcher is not None and self._matcher.matched

    def _read(self, output: Output) -> tuple[tuple[int, ...], str]:
        """Tokens up to the one that completes a stop string, and the text to be said with them."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return output.tokens, ""
        pieces = []
        for count, token in enumerate(output.tokens, 1):
            piece = "" if self._is_stop_token(output, count) else detokenizer.push(token)
            pieces.append(piece if self._matcher is None else self._matcher.push(piece))
            if self._stopped:
                return output.tokens[:count], "".join(pieces)
        if output.finish is not None:
            rest = detokenizer.flush()
            pieces.append(rest if self._matcher is None else self._matcher.end(rest))
        return output.tokens, "".join(pieces)

    def _is_stop_token(self, output: Output, count: int) -> bool:
        """The token that ended the reply belongs to its ids, not to its text."""
        if output.finish is not FinishReason.STOP or count < len(output.tokens) or self._include_stop:
            return False
        return output.tokens[-1] in self.request.stop_ids


@dataclass(frozen=True)
class Style:
    """How the answer to one HTTP call is written. `token_ids`: with the ids of prompts and replies."""

    model: str
    token_ids: bool
    include_usage: bool


class CompletionWriter:
    """text_completion objects. Stream events are put together by hand: there are thousands a second."""

    ID, WHOLE, CHUNK = "cmpl-", "text_completion", "text_completion"

    def __init__(self, style: Style):
        self._style = style
        self._id = self.ID + uuid.uuid4().hex
        self._created = int(time.time())
        head = json.dumps(self._object(self.CHUNK), separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = '}],"usage":null}\n\n' if style.include_usage else "}]}\n\n"

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        return {**self._object(self.WHOLE), "choices": choices, "usage": usage(replies)}

    def opening(self, replies: Sequence[Reply]) -> str:
        """The events before the first piece: here only prompts' ids, if asked for."""
        if not self._style.token_ids:
            return ""
        return "".join(
            f'{self._head}{index},"text":"","logprobs":null,"finish_reason":null,'
            f'"prompt_token_ids":{reply.request.prompt.tolist()},"token_ids":[]{self._tail}'
            for index, reply in enumerate(replies)
        )

    def piece(self, index: int, piece: Piece, finish: FinishReason | None) -> str:
        """The event for one piece of a reply, the last one with its finish; nothing if there is nothing to say."""
        token_ids = self._style.token_ids
        if not (piece.text or finish or (token_ids and piece.tokens)):
            return ""
        ids = f',"token_ids":{list(piece.tokens)}' if token_ids else ""
        reason = f'"{finish}"' if finish else "null"
        content = self._content(piece.text)
        return f'{self._head}{index},{content},"logprobs":null,"finish_reason":{reason}{ids}{self._tail}'

    def closing(self, replies: Sequence[Reply]) -> str:
        """The events behind the last piece: usage if asked for, and the end."""
        if not self._style.include_usage:
            return "data: [DONE]\n\n"
        last = {**self._object(self.CHUNK), "choices": [], "usage": usage(replies)}
        return f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._style.model}

    def _content(self, text: str) -> str:
        return f'"text":{_encode_text(text)}'

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        choice = {"index": index, "text": "".join(reply.texts), "logprobs": None, "finish_reason": reply.finish}
        if self._style.token_ids:
            choice |= {"prompt_token_ids": reply.request.prompt.tolist(), "token_ids": reply.tokens}
        return choice


class ChatWriter(CompletionWriter):
    """chat.completion objects: one reply, whose prompt's ids stand beside the choice and not inside."""

    ID, WHOLE, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        answer = super().whole(replies)
        if self._style.token_ids:
            answer["prompt_token_ids"] = replies[0].request.prompt.tolist()
        return answer

    def opening(self, replies: Sequence[Reply]) -> str:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        first = {**self._object(self.CHUNK), "choices": [choice]}
        if self._style.token_ids:
            first["prompt_token_ids"] = replies[0].request.prompt.tolist()
        if self._style.include_usage:
            first["usage"] = None
        return f"data: {json.dumps(first)}\n\n"

    def _content(self, text: str) -> str:
        return f'"delta":{{"content":{_encode_text(text)}}}' if text else '"delta":{}'

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(reply.texts),
            "refusal": None,
            "annotations": [],
        }
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": reply.finish}
        if self._style.token_ids:
            choice["token_ids"] = reply.tokens
        return choice


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """OpenAI's usage object over all replies of a call."""
    prompt = sum(len(reply.request.prompt) for reply in replies)
    generated = sum(len(reply.tokens) for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(reply.cached for reply in replies)},
    }
