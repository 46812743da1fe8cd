"""A reply while it grows, and its output forms: OpenAI's completion and chat objects, whole or as a
stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...scheduler.types import (
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RowResult,
    TokenLogprobs,
    Usage,
)
from ..observe.metrics import SOURCES
from ..text.tokenizer import Detokenizer, StopMatcher, Tokenizer
from .engine_client import OutputStream
from .errors import error_object
from .logprobs import LogprobsWriter
from .reply_reader import Reader, ReplyParts, ToolCall

_encode_text = json.JSONEncoder().encode
NO_TOKENS: Mapping[int, str] = {}


class Piece(NamedTuple):
    """One result's addition to a reply. `result`: without the tokens after a stop string. `offsets`
    (into the text of the reply) are those of its tokens, if log probabilities were requested.
    `stop`: as `Reply.stop_reason`. `thought`: comes before `text`, and is not in it."""

    text: str
    result: RowResult
    offsets: tuple[int, ...] = ()
    calls: Sequence[ToolCall] = ()
    stop: str | int | None = None
    thought: str = ""

    def joined(self, later: Piece) -> Piece | None:
        """This piece and the next one of the same reply as one; None if that would change the order
        of thoughts, text and calls."""
        if (later.thought and (self.text or self.calls)) or (later.text and self.calls):
            return None
        result = later.result._replace(
            tokens=self.result.tokens + later.result.tokens,
            logprobs=self.result.logprobs + later.result.logprobs,
        )
        return Piece(
            self.text + later.text,
            result,
            self.offsets + later.offsets,
            [*self.calls, *later.calls],
            later.stop,
            self.thought + later.thought,
        )


class Reply:
    """Turns one request's results into text, ends it at a stop string, and confirms its length for
    requests with `confirm`."""

    def __init__(
        self,
        request: Request,
        stream: OutputStream,
        tokenizer: Tokenizer | None,
        matcher: StopMatcher | None = None,
        *,
        continues_prompt: bool,
        include_stop: bool = False,
        reader: Reader | None = None,
        kept: Mapping[int, str] = NO_TOKENS,
        echoed: str = "",
        stop_token_ids: Collection[int] = (),
        special_stops: Mapping[int, str] = NO_TOKENS,
    ):
        """`matcher` needs a tokenizer and a request with `confirm`.

        `continues_prompt`: the text is decoded as the prompt's continuation (a leading space
        stays), not on its own. `include_stop`: the text of a stop token stays, unless it is a
        special token. `reader`: divides the text into thoughts, content and calls. `kept`: special
        tokens with a text for the reader. `echoed`: precedes the reply's text; offsets count from
        its beginning. `stop_token_ids`: the client's ids that end the reply. `special_stops`: the
        client's stop strings that are special tokens, by their ids.
        """
        context: Sequence[int] = ()
        if tokenizer is not None and continues_prompt:
            context = tokenizer.context(request.prompt)
        self.request = request
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.content: list[str] = []
        self.thoughts: list[str] = []
        self.reasoning_tokens = 0  # of the thoughts
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.echoed = echoed
        self.offsets: list[int] = []
        self.sources = Usage()
        self.queued = 0.0
        # leading tokens of the context that the newest token did not see, if known
        self.truncated = 0
        self.started: float | None = None  # time of the first token, time.perf_counter's seconds
        self.finish: FinishReason | None = None
        self._stream = stream
        self._detokenizer = Detokenizer(tokenizer, context) if tokenizer is not None else None
        self._matcher = matcher
        self._include_stop = include_stop
        self._reader = reader
        self._kept = kept
        self._stop_token_ids = stop_token_ids
        self._special_stops = special_stops
        self._length = len(echoed)
        self._client_gone = False

    @property
    def reason(self) -> str | None:
        """The finish reason for the client."""
        return "tool_calls" if self.calls and self.finish is FinishReason.STOP else self.finish

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, or None."""
        if self._stopped:
            return self._matcher.match if self._matcher is not None else None
        last = self.tokens[-1] if self.tokens and self.finish is FinishReason.STOP else None
        return None if last is None else self._special_stops.get(last)

    @property
    def stop_reason(self) -> str | int | None:
        """The client's stop string or stop token id that ended the reply; None if neither did."""
        if self.stop_string is not None:
            return self.stop_string
        last = self.tokens[-1] if self.tokens and self.finish is FinishReason.STOP else None
        return last if last in self._stop_token_ids else None

    @property
    def message(self) -> dict[str, Any]:
        """The message in the form in which the chat template reads it when the client sends it
        back."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if thought := "".join(self.thoughts):
            message["reasoning_content"] = thought
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        return message

    def add(self, result: RowResult) -> Piece:
        """Takes a result. Returns the piece to send, without text after a stop string.

        Raises RequestError (UNAVAILABLE) if the engine aborted the request.
        """
        if result.finish is FinishReason.ABORT:
            raise RequestError(
                ErrorKind.UNAVAILABLE, "the server is shutting down and has ended this request"
            )
        if result.usage is not None:
            self.sources = result.usage
            self.queued = result.queued or 0.0
            self.started = time.perf_counter()
        self.truncated = max(self.truncated, result.truncated)
        stopped = self._stopped
        start = len(self.tokens)
        parts = ReplyParts()
        count, text = (0, "") if stopped else self._read(result, parts)
        if count < len(result.tokens):
            result = result._replace(tokens=result.tokens[:count], logprobs=result.logprobs[:count])
        self.tokens += result.tokens
        self.texts.append(text)
        if result.finish is not None:
            self.finish = FinishReason.STOP if self._stopped else result.finish
        self._end_parts(parts, result)
        self.thoughts.append(parts.thought)
        self.content.append(parts.content)
        self.calls += parts.calls
        self.logprobs += result.logprobs
        self.prompt_logprobs += result.prompt_logprobs
        if self.request.confirm and not stopped and (self._stopped or result.finish is not None):
            self._stream.finish(self.request.id, len(self.tokens))
        offsets = tuple(self.offsets[start:])
        stop = self.stop_reason if self.finish is not None else None
        return Piece(parts.content, result, offsets, parts.calls, stop, parts.thought)

    def end_here(self) -> bool:
        """Ends the reply, whose client has gone, with the text so far. Its last result comes later.
        Returns False, and does nothing, if nothing of it could be shown yet."""
        has_text = any(self.content) or any(self.thoughts) or bool(self.calls)
        if not (has_text or (self._detokenizer is None and self.tokens)):
            return False
        if self.finish is None and not self._stopped:
            self._client_gone = True
            self._stream.finish(self.request.id, len(self.tokens))
        return True

    def _end_parts(self, parts: ReplyParts, result: RowResult) -> None:
        """Ends the reader's text with the reply."""
        reader = self._reader
        if reader is None or result.finish is None:
            return
        unexpected = self._client_gone or self.finish is FinishReason.LENGTH
        cut = unexpected or (self._stopped and reader.in_call)
        parts.add(reader.end(cut))

    @property
    def _stopped(self) -> bool:
        """True if a stop string is complete, or the client has gone. The engine may still be
        generating; its last output is waited for."""
        return self._client_gone or (self._matcher is not None and self._matcher.matched)

    def _read(self, result: RowResult, parts: ReplyParts) -> tuple[int, str]:
        """Returns how many of the tokens belong to the reply (all, or those up to the one that
        completes a stop string), and their text. `parts` gets the same, divided."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            self.offsets += [0] * len(result.logprobs)
            return len(result.tokens), ""
        pieces = []
        for count, token in enumerate(result.tokens, 1):
            if self._is_stop_token(token, len(self.tokens) + count):
                piece = ""
            elif token in self._kept:
                pieces.append(self._say_kept(detokenizer, token, parts))
                piece = ""
            else:
                piece = detokenizer.push(token)
            if result.logprobs:
                self.offsets.append(self._length)
                self._length += len(piece)
            text = piece if self._matcher is None else self._matcher.push(piece)
            pieces.append(text)
            self._divide(text, parts)
            if self._stopped:
                return count, "".join(pieces)
        if result.finish is not None:
            rest = detokenizer.flush()
            text = rest if self._matcher is None else self._matcher.end(rest)
            pieces.append(text)
            self._divide(text, parts, counts=False)
        return len(result.tokens), "".join(pieces)

    def _say_kept(self, detokenizer: Detokenizer, token: int, parts: ReplyParts) -> str:
        """Returns the text that this special token ends. Only the reader sees the token."""
        text = detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.release() + text
        self._divide(text, parts, counts=False)
        self._divide(self._kept[token], parts, counts=False)
        return text

    def _divide(self, text: str, parts: ReplyParts, counts: bool = True) -> None:
        """`counts`: the text is one more token."""
        if self._reader is None:
            parts.content += text
            return
        parts.add(self._reader.push(text))
        self.reasoning_tokens += counts and self._reader.thinking

    def _is_stop_token(self, token: int, count: int) -> bool:
        """True if this is the `count`th token and ends the reply: it belongs to the reply's ids,
        not to its text. The end itself may come later: with `--save sync` after the turn is on
        DISK."""
        return (
            token in self.request.stop_ids
            and count >= self.request.min_tokens
            and not self._include_stop
        )


@dataclass(frozen=True)
class Style:
    """The form of one HTTP call's answer. `token_ids`: includes the ids of prompts and replies.

    `sources`: usage includes the sources of the prompt's tokens. `echo`: the prompt's text precedes
    the reply's. `thoughts`: the answer includes them.
    """

    model: str
    token_ids: bool
    include_usage: bool
    sources: bool = False
    logprobs: LogprobsWriter | None = None
    echo: bool = False
    thoughts: bool = True


class PromptParts(NamedTuple):
    """What all choices of one prompt have in common: `fields` of each, and with `echo` the
    beginning of their `logprobs`."""

    fields: dict[str, Any]
    logprobs: dict[str, list[Any]]


class CompletionWriter:
    """text_completion objects. Stream events are formatted by hand: there are thousands per
    second."""

    ID, WHOLE, CHUNK = "cmpl-", "text_completion", "text_completion"
    HEADERS: ClassVar[Mapping[str, str]] = {}  # of the answer, beside its id

    def __init__(self, style: Style):
        self._style = style
        self.id = self.ID + uuid.uuid4().hex
        self._created = int(time.time())
        head = json.dumps(self._object(self.CHUNK), separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = '}],"usage":null}\n\n' if style.include_usage else "}]}\n\n"

    @property
    def shows_ids(self) -> bool:
        """Whether the answer has the token ids of prompts and replies."""
        return self._style.token_ids

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer of a call that does not stream. With log probabilities this takes seconds for
        a long prompt or many choices. It may run in another thread."""
        choices = []
        for index, reply in enumerate(replies):
            if reply.request.choice == 0:
                prompt = self._prompt_parts(reply)
            choices.append(self._choice(index, reply, prompt))
        return {
            **self._object(self.WHOLE),
            "choices": choices,
            "usage": usage(replies, self._style.sources),
        }

    def opening(self, replies: Sequence[Reply]) -> str:
        """The events before the first piece: prompts' text and ids, if requested."""
        if not (self._style.token_ids or self._style.echo):
            return ""
        return "".join(
            f"{self._head}{index},{self._content(Piece(reply.echoed, RowResult(reply.request.id)))}"
            f',"logprobs":null,"finish_reason":null{self._prompt_ids(reply)}{self._tail}'
            for index, reply in enumerate(replies)
        )

    def _prompt_ids(self, reply: Reply) -> str:
        ids = reply.request.prompt.tolist()
        return f',"prompt_token_ids":{ids},"token_ids":[]' if self._style.token_ids else ""

    def piece(self, index: int, piece: Piece, finish: str | None) -> str:
        """The event for one piece of a reply, the last one with its finish reason; "" for an empty
        piece."""
        token_ids = self._style.token_ids
        result = piece.result
        if not (
            piece.text
            or (piece.thought and self._style.thoughts)
            or finish
            or result.logprobs
            or piece.calls
            or (token_ids and result.tokens)
        ):
            return ""
        ids = f',"token_ids":{list(result.tokens)}' if token_ids else ""
        reason = f'"{finish}","stop_reason":{json.dumps(piece.stop)}' if finish else "null"
        content = self._content(piece)
        logprobs = json.dumps(self._logprobs(piece)) if result.logprobs else "null"
        ending = f'"logprobs":{logprobs},"finish_reason":{reason}{ids}'
        return f"{self._head}{index},{content},{ending}{self._tail}"

    def stored(self, replies: Sequence[Reply]) -> str | None:
        """The stored body with which later calls get the answer; None except for a response."""
        return None

    def item_ids(self, replies: Sequence[Reply]) -> dict[str, list[str]]:
        """The field of the reply's message with the ids that its items have in a response; none if
        it has no such items."""
        return {}

    def closing(self, replies: Sequence[Reply]) -> str:
        """The events after the last piece: usage if requested, and the end."""
        if not self._style.include_usage:
            return "data: [DONE]\n\n"
        last = {
            **self._object(self.CHUNK),
            "choices": [],
            "usage": usage(replies, self._style.sources),
        }
        return f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n"

    def failure(self, error: RequestError) -> str:
        """The events after the last piece of a failed call."""
        return f"data: {json.dumps(error_object(error))}\n\ndata: [DONE]\n\n"

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._style.model}

    def _content(self, piece: Piece) -> str:
        return f'"text":{_encode_text(piece.text)}'

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        assert self._style.logprobs is not None
        return self._style.logprobs.completion(
            piece.result.tokens, piece.result.logprobs, piece.offsets
        )

    def _prompt_logprobs(self, first: Reply) -> dict[str, Any]:
        writer = self._style.logprobs
        if writer is None or writer.prompt_top is None:
            return {}
        return {"prompt_logprobs": writer.prompt(first.request.prompt, first.prompt_logprobs)}

    def _prompt_parts(self, first: Reply) -> PromptParts:
        """`first`: choice 0 of the prompt; only it has the prompt's log probabilities."""
        prompt = first.request.prompt
        fields = self._prompt_logprobs(first)
        if self._style.token_ids:
            fields["prompt_token_ids"] = prompt.tolist()
        writer = self._style.logprobs
        if writer is None or writer.top is None or not self._style.echo:
            return PromptParts(fields, {})
        entries = [None, *first.prompt_logprobs]
        offsets = writer.offsets(prompt, first.echoed)
        return PromptParts(fields, writer.completion(prompt, entries, offsets))

    def _choice(self, index: int, reply: Reply, prompt: PromptParts) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": reply.echoed + "".join(reply.texts),
            "logprobs": self._whole_logprobs(reply, prompt),
            "finish_reason": reply.finish,
            "stop_reason": reply.stop_reason,
            **prompt.fields,
        }
        if self._style.token_ids:
            choice["token_ids"] = reply.tokens
        return choice

    def _whole_logprobs(self, reply: Reply, prompt: PromptParts) -> dict[str, Any] | None:
        writer = self._style.logprobs
        if writer is None or writer.top is None:
            return None
        own = writer.completion(reply.tokens, reply.logprobs, reply.offsets)
        return {name: [*prompt.logprobs.get(name, ()), *values] for name, values in own.items()}


class ChatWriter(CompletionWriter):
    """chat.completion objects: one reply; the prompt's ids are next to the choice and not
    inside."""

    ID, WHOLE, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        answer = super().whole(replies)
        answer |= self._prompt_logprobs(replies[0])
        if self._style.token_ids:
            answer["prompt_token_ids"] = replies[0].request.prompt.tolist()
        return answer

    def opening(self, replies: Sequence[Reply]) -> str:
        delta = {"role": "assistant", "content": ""}
        first = self._object(self.CHUNK)
        if self._style.token_ids:
            first["prompt_token_ids"] = replies[0].request.prompt.tolist()
        if self._style.include_usage:
            first["usage"] = None
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(replies))
        ]
        return "".join(
            f"data: {json.dumps({**first, 'choices': [choice]})}\n\n" for choice in choices
        )

    def _content(self, piece: Piece) -> str:
        if piece.calls or (piece.thought and self._style.thoughts):
            delta = self._thought(piece.thought)
            if piece.text or piece.calls:
                delta["content"] = piece.text or None
            if piece.calls:
                calls = [{"index": call.index, **call.as_object()} for call in piece.calls]
                delta["tool_calls"] = calls
            return f'"delta":{json.dumps(delta)}'
        return f'"delta":{{"content":{_encode_text(piece.text)}}}' if piece.text else '"delta":{}'

    def _thought(self, text: str) -> dict[str, Any]:
        """A thought under the names of vLLM's older and newer versions."""
        if not text or not self._style.thoughts:
            return {}
        return {"reasoning_content": text, "reasoning": text}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        assert self._style.logprobs is not None
        return self._style.logprobs.chat(piece.result.tokens, piece.result.logprobs)

    def _prompt_parts(self, first: Reply) -> PromptParts:
        return PromptParts({}, {})

    def _choice(self, index: int, reply: Reply, prompt: PromptParts) -> dict[str, Any]:
        content = "".join(reply.content)
        writer = self._style.logprobs
        logprobs = None
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reply.calls and not content else content,
            "refusal": None,
            "annotations": [],
            **self._thought("".join(reply.thoughts)),
        }
        if reply.calls:
            message["tool_calls"] = [call.as_object() for call in reply.calls]
        if writer is not None and writer.top is not None:
            logprobs = writer.chat(reply.tokens, reply.logprobs)
        choice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reply.reason,
            "stop_reason": reply.stop_reason,
        }
        if self._style.token_ids:
            choice["token_ids"] = reply.tokens
        return choice


def usage(replies: Sequence[Reply], sources: bool = False) -> dict[str, Any]:
    """OpenAI's usage object for all replies of a call; with `sources` also the sources of the
    prompts' KV.

    `truncated_tokens`: present if contexts have overflowed; leading tokens that the ends of the
    replies did not see.
    """
    generated = sum(len(reply.tokens) for reply in replies)
    reasoning = sum(reply.reasoning_tokens for reply in replies)
    # the choices of a prompt share it
    replies = [reply for reply in replies if reply.request.choice == 0]
    prompt = sum(len(reply.request.prompt) for reply in replies)
    truncated = sum(reply.truncated for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(reply.sources.cached for reply in replies),
            **(
                {name: sum(getattr(reply.sources, name) for reply in replies) for name in SOURCES}
                if sources
                else {}
            ),
            **({"truncated_tokens": truncated} if truncated else {}),
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
