"""OpenAI's Responses API: the writer of an answer, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...scheduler.types import FinishReason, RequestError
from ..conversations.transcript import KEPT_IDS
from ..frontend.reply import CompletionWriter, Piece, Reply, Style, usage
from ..frontend.reply_reader import ToolCall
from .response_items import CUSTOM_INPUT, RESPONSE_ID, encoded_thought, item_id
from .response_tools import CustomTool, OwnTool


@dataclass(frozen=True)
class About:
    """What the answer repeats of the request.

    fields         of the response object
    tools          by the names that the model sees
    encrypted      items of thoughts have `encrypted_content`
    summaries      thoughts are, whole, in `summary` instead of `content`
    store, stream  as in the body
    """

    fields: Mapping[str, Any]
    tools: Mapping[str, OwnTool]
    encrypted: bool
    summaries: bool
    store: bool
    stream: bool


@dataclass
class OutputItem:
    """An item of the output. `text`: pieces of a message or of thoughts, or a call's arguments.
    `tool`: the tool that is called; None: the model has invented it. `encrypted`, `summary`: see
    `About`."""

    id: str
    type: str
    text: list[str] = field(default_factory=list)
    call: ToolCall | None = None
    tool: OwnTool | None = None
    encrypted: bool = False
    summary: bool = False

    def part(self, text: str) -> dict[str, Any]:
        """The one part of a message or of thoughts."""
        if self.type == "reasoning":
            return {"type": "summary_text" if self.summary else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _names(self) -> dict[str, str]:
        """Of the tool, as the client named it."""
        assert self.call is not None
        if self.tool is None:
            return {"name": self.call.name}
        names = {"name": self.tool.tool.name}
        if self.tool.namespace is not None:
            names["namespace"] = self.tool.namespace
        return names

    def as_object(self, status: str) -> dict[str, Any]:
        """The item in the answer. One in progress has no text yet."""
        begun = status == "in_progress"
        text = "" if begun else "".join(self.text)
        about = {"id": self.id, "type": self.type, "status": status}
        if self.call is not None:
            key = "input" if self.type == "custom_tool_call" else "arguments"
            return {**about, "call_id": self.call.id, **self._names(), key: text}
        content = [] if begun else [self.part(text)]
        if self.type == "reasoning":
            thought: dict[str, Any] = {**about, "summary": [], "content": []}
            thought["summary" if self.summary else "content"] = content
            if self.encrypted and not begun:
                thought["encrypted_content"] = encoded_thought(text)
            return thought
        return {**about, "role": "assistant", "content": content}


class ResponseWriter(CompletionWriter):
    """response objects, whole or as the documented events: thoughts, text and tool calls, in the
    order of the reply. One item ends before the next begins."""

    ID = RESPONSE_ID
    # The usage counts earlier thoughts. Without this Codex adds an estimate of each that has an
    # `encrypted_content`, and compacts its history too early.
    HEADERS: ClassVar = {"x-reasoning-included": "true"}

    def __init__(self, style: Style, about: About):
        super().__init__(style)
        self._about = about
        self._items: list[OutputItem] = []
        self._in_text = False  # the last item may grow
        self._events = 0
        self._drawn: dict[str, float] = {}  # the sampling's fields in the response

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,) = replies
        self._see(reply)
        self._complete(reply)
        done = reply.finish is FinishReason.STOP
        status = "completed" if done else "incomplete"
        counts = usage(replies, self._style.sources)
        return self._response(status) | {
            "incomplete_details": None if done else {"reason": "max_output_tokens"},
            "output": self._output(status),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
                "total_tokens": counts["total_tokens"],
            },
        }

    def stored(self, replies: Sequence[Reply]) -> str | None:
        return json.dumps(self.whole(replies)) if self._about.store else None

    def item_ids(self, replies: Sequence[Reply]) -> dict[str, list[str]]:
        """A message has one item of thoughts, then one of text, then its calls."""
        (reply,) = replies
        self._complete(reply)
        order = ("reasoning", "message")
        apart = [[item.id for item in self._items if item.type == kind] for kind in order]
        calls = [item.id for item in self._items if item.call is not None]
        if any(len(ids) > 1 for ids in apart):
            return {}
        return {KEPT_IDS: [*apart[0], *apart[1], *calls]}

    def _complete(self, reply: Reply) -> None:
        """A reply that is no stream has its items from now on."""
        if not self._items and not self._about.stream:
            self._grow("".join(reply.thoughts), "".join(reply.content), reply.calls, ended=True)

    def opening(self, replies: Sequence[Reply]) -> str:
        self._see(replies[0])
        started = self._response("in_progress")
        return "".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
            )
        )

    def piece(self, index: int, piece: Piece, finish: str | None) -> str:
        return "".join(self._grow(piece.thought, piece.text, piece.calls, ended=finish is not None))

    def closing(self, replies: Sequence[Reply]) -> str:
        whole = self.whole(replies)
        return "".join(
            (
                *self._end_text(whole["status"]),
                self._event(f"response.{whole['status']}", response=whole),
            )
        )

    def failure(self, error: RequestError) -> str:
        """Uses OpenAI's code `server_error`: a client's errors are refused before a stream
        begins."""
        what = {"code": "server_error", "message": error.message}
        failed = {"error": what, "output": self._output("incomplete")}
        return self._event("response.failed", response=self._response("failed") | failed)

    def _grow(
        self, thought: str, text: str, calls: Sequence[ToolCall], *, ended: bool
    ) -> list[str]:
        """Adds to the output. Returns the events. An output that ends without an item gets an
        empty message."""
        events: list[str] = []
        for kind, piece in (("reasoning", thought), ("message", text)):
            if not piece:
                continue
            if not self._in_text or self._items[-1].type != kind:
                events += (*self._end_text("completed"), *self._begin(kind))
            self._items[-1].text.append(piece)
            events.append(self._text_event("delta", delta=piece))
        for call in calls:
            events += (*self._end_text("completed"), *self._add_call(call))
        if ended and not self._items:
            events += self._begin("message")
        return events

    def _begin(self, kind: str) -> list[str]:
        item = OutputItem(
            self._next_id(kind),
            kind,
            encrypted=self._about.encrypted,
            summary=kind == "reasoning" and self._about.summaries,
        )
        self._items.append(item)
        self._in_text = True
        return [
            self._item_event("added", "in_progress"),
            self._part_event("added", part=item.part("")),
        ]

    def _end_text(self, status: str) -> list[str]:
        """The events of the end of a message or of thoughts, if the last item is one."""
        if not self._in_text:
            return []
        self._in_text = False
        item = self._items[-1]
        text = "".join(item.text)
        return [
            self._text_event("done", text=text),
            self._part_event("done", part=item.part(text)),
            self._item_event("done", status),
        ]

    def _add_call(self, call: ToolCall) -> list[str]:
        tool = self._about.tools.get(call.name)
        custom = tool is not None and isinstance(tool.tool, CustomTool)
        kind = "custom_tool_call" if custom else "function_call"
        name = "custom_tool_call_input" if custom else "function_call_arguments"
        text = _custom_input(call.arguments) if custom else call.arguments
        self._items.append(OutputItem(self._next_id(kind), kind, [text], call, tool))
        last = {"input" if custom else "arguments": text}
        return [
            self._item_event("added", "in_progress"),
            self._event(f"response.{name}.delta", **self._place(), delta=text),
            self._event(f"response.{name}.done", **self._place(), **last),
            self._item_event("done", "completed"),
        ]

    def _next_id(self, kind: str) -> str:
        return item_id(kind, self.id, len(self._items))

    def _part_event(self, what: str, **fields: Any) -> str:
        kind = "reasoning_summary_part" if self._items[-1].summary else "content_part"
        return self._event(f"response.{kind}.{what}", **self._part_place(), **fields)

    def _text_event(self, what: str, **fields: Any) -> str:
        item = self._items[-1]
        if item.type == "reasoning":
            kind = "reasoning_summary_text" if item.summary else "reasoning_text"
            return self._event(f"response.{kind}.{what}", **self._part_place(), **fields)
        return self._event(
            f"response.output_text.{what}", **self._part_place(), **fields, logprobs=[]
        )

    def _item_event(self, what: str, status: str) -> str:
        return self._event(
            f"response.output_item.{what}",
            output_index=len(self._items) - 1,
            item=self._items[-1].as_object(status),
        )

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"

    def _place(self) -> dict[str, Any]:
        """Of the last item."""
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _part_place(self) -> dict[str, Any]:
        index = "summary_index" if self._items[-1].summary else "content_index"
        return {**self._place(), index: 0}

    def _output(self, status: str) -> list[dict[str, Any]]:
        """The items of a reply with this status. Only the last item can be incomplete. A call is
        always complete, because the reader gives whole calls only."""
        items = [item.as_object("completed") for item in self._items]
        if self._items and self._items[-1].call is None:
            items[-1]["status"] = status
        return items

    def _see(self, reply: Reply) -> None:
        sampling = reply.request.sampling
        self._drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._style.model,
            "output": [],
            "usage": None,
            **self._about.fields,
            **self._drawn,
        }


def _custom_input(arguments: str) -> str:
    """The text for a custom tool. A model that was not forced may have called its function with
    other arguments: then it is the only text among them, or all of them as JSON."""
    given = json.loads(arguments)
    text = given.get(CUSTOM_INPUT)
    if not isinstance(text, str) and len(given) == 1:
        (text,) = given.values()
    return text if isinstance(text, str) else arguments
