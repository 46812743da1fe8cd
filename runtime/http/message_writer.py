"""Anthropic's Messages API: the writer of an answer, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...scheduler.types import FinishReason, RequestError
from ..frontend.errors import anthropic_error_object
from ..frontend.reply import CompletionWriter, Piece, Reply, Style
from ..frontend.reply_reader import ToolCall
from ..observe.metrics import SOURCES

SIGNATURE = "bm9uZQ=="
"""Of every thought: "none" in base64, as Anthropic's are. Nothing here reads it, but clients take
an unsigned thought for text."""


class MessageWriter(CompletionWriter):
    """message objects, whole or as the documented events: blocks of thoughts, of text and of tool
    calls, in the order of the reply."""

    ID = "msg_"

    def __init__(self, style: Style, most_tokens: int):
        """`most_tokens`: the body's limit; the request's is lower if the context ends before it."""
        super().__init__(style)
        self._most_tokens = most_tokens
        self._reply: Reply | None = None
        self._begun = False
        self._blocks = 0  # blocks that have ended
        self._in_thought = False
        self._in_text = False

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,) = replies
        content = "".join(reply.content)
        texts = [_text_block(content)] if content else []
        if thought := "".join(reply.thoughts):
            texts = [_thought_block(thought, SIGNATURE), *texts]
        return self._message(reply, [*texts, *map(_call_block, reply.calls)], **self._end(reply))

    def opening(self, replies: Sequence[Reply]) -> str:
        """None: the first event contains the sources of the prompt, which arrive with the first
        output."""
        (self._reply,) = replies
        return ""

    def piece(self, index: int, piece: Piece, finish: str | None) -> str:
        events: list[str] = []
        if not self._begun:
            self._begun = True
            started = self._started(len(piece.result.tokens))
            events += (_event("message_start", message=started), _event("ping"))
        if piece.thought:
            if not self._in_thought:
                events.append(self._stop_block())
                self._in_thought = True
                events.append(self._start(_thought_block("", "")))
            events.append(self._delta({"type": "thinking_delta", "thinking": piece.thought}))
        if piece.text:
            if not self._in_text:
                events.append(self._stop_block())
                self._in_text = True
                events.append(self._start(_text_block("")))
            events.append(self._delta({"type": "text_delta", "text": piece.text}))
        for call in piece.calls:
            events += (
                self._stop_block(),
                self._start({**_call_block(call), "input": {}}),
                self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
                self._stop(),
            )
        return "".join(events)

    def closing(self, replies: Sequence[Reply]) -> str:
        (reply,) = replies
        last = _event("message_delta", delta=self._end(reply), usage=self._usage(reply))
        return self._stop_block() + last + _event("message_stop")

    def failure(self, error: RequestError) -> str:
        return _event("error", **anthropic_error_object(error))

    def _started(self, tokens: int) -> dict[str, Any]:
        """The message, of which the first events have `tokens` tokens."""
        assert self._reply is not None
        message = self._message(self._reply, [], stop_reason=None, stop_sequence=None)
        message["usage"]["output_tokens"] = tokens
        return message

    def _start(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _stop(self) -> str:
        self._blocks += 1
        return _event("content_block_stop", index=self._blocks - 1)

    def _stop_block(self) -> str:
        """Ends the block of text or thought that is open."""
        if not (self._in_text or self._in_thought):
            return ""
        signature = ""
        if self._in_thought:
            signature = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._in_text = self._in_thought = False
        return signature + self._stop()

    def _message(
        self, reply: Reply, content: list[dict[str, Any]], **end: str | None
    ) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self._style.model}
        return {**about, "content": content, **end, "usage": self._usage(reply)}

    def _usage(self, reply: Reply) -> dict[str, int]:
        """Each token of the prompt counts once. Caching has no charge, so no token counts as
        created."""
        counts = {
            "input_tokens": len(reply.request.prompt) - reply.sources.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.sources.cached,
            "output_tokens": len(reply.tokens),
        }
        if self._style.sources:
            counts |= {name: getattr(reply.sources, name) for name in SOURCES}
        return counts

    def _end(self, reply: Reply) -> dict[str, str | None]:
        """The reply's stop reason."""
        if reply.stop_string is not None and not reply.calls:
            return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
        reason = "tool_use" if reply.calls else "end_turn"
        if reply.finish is FinishReason.LENGTH:
            full = reply.request.max_tokens < self._most_tokens
            reason = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thought_block(thought: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought, "signature": signature}


def _call_block(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": json.loads(call.arguments),
    }


def _event(event_kind: str, **fields: Any) -> str:
    data = json.dumps({"type": event_kind, **fields}, separators=(",", ":"))
    return f"event: {event_kind}\ndata: {data}\n\n"
