"""OpenAI's Responses API: the body of /v1/responses, the writer of its answer, and the endpoints of
stored responses.

A stored response is the state of a conversation that never changes: any number of later responses
may continue it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field, field_validator, model_validator

from ...scheduler.types import ErrorKind, FinishReason, RequestError
from ..conversations.schema import Name
from ..conversations.transcript import Message
from ..conversations.turns import TurnManager
from ..frontend.bodies import GenerationBody
from ..frontend.body_base import Body, NonEmpty
from ..frontend.chat_messages import MOST_MESSAGES, TemplateVariables, text_only, with_thinking
from ..frontend.generate import Generate
from ..frontend.reply import CompletionWriter, Piece, Reply, Style, usage
from ..frontend.structured_output import GUIDED
from ..text.tokenizer import Tokenizer
from .auth import owner_of


class Part(Body):
    """A part of a message; of a reply that is sent back unchanged, only its text is used."""

    NEUTRAL: ClassVar = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text"]
    text: str


class Item(Body):
    """A message, written by a client or sent back from a response."""

    IGNORED = frozenset({"id", "status"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: Any) -> Any:
        return text_only(content, "input_text", "output_text")

    def message(self) -> Message:
        content = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )
        return {"role": self.role, "content": content}


class Reasoning(Body):
    """`effort`: passed to the chat template."""

    IGNORED = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: NonEmpty | None = None


class TextOptions(Body):
    IGNORED = frozenset({"verbosity"})
    NEUTRAL: ClassVar = {"format": ({"type": "text"},)}


class ResponseBody(GenerationBody):
    """POST /v1/responses."""

    IGNORED = (GenerationBody.IGNORED | {"max_tool_calls", "parallel_tool_calls"}) - {
        "store",
        "metadata",
    }
    NEUTRAL: ClassVar = {
        **GenerationBody.NEUTRAL,
        **dict.fromkeys(("response_format", "structured_outputs", *GUIDED), ()),
        "background": (False,),
        "context_management": ([],),
        "enable_response_messages": (False,),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),  # there is no such content
        "previous_input_messages": ([],),
        "previous_response": (),
        "prompt": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    }

    input: str | Annotated[list[Item], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    previous_response_id: NonEmpty | None = None
    store: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_history(self) -> ResponseBody:
        if self.previous_response_id is not None and self.conversation_id is not None:
            raise RequestError(
                ErrorKind.INVALID,
                "a response goes on from previous_response_id or from conversation",
                "previous_response_id",
            )
        if not self.input:
            raise RequestError(ErrorKind.INVALID, "the input is empty", "input")
        if self.max_tokens is not None:
            raise RequestError(
                ErrorKind.INVALID,
                "the length of a response is limited by max_output_tokens",
                "max_tokens",
            )
        if self.return_token_ids:
            raise RequestError(
                ErrorKind.INVALID,
                "return_token_ids is not supported for responses",
                "return_token_ids",
            )
        return self

    def generate(self) -> Generate:
        """See `GenerationBody`."""
        instructions: tuple[Message, ...] = ()
        if self.instructions is not None:
            instructions = ({"role": "system", "content": self.instructions},)
        effort = self.reasoning.effort if self.reasoning is not None else None
        return replace(
            super().generate(),
            messages=tuple(self.messages()),
            template_variables=with_thinking(self.chat_template_kwargs, None, effort),
            prompt_field="input",
            response=True,
            previous=self.previous_response_id,
            instructions=instructions,
            store=self.store,
            limit=self.max_output_tokens,
            limit_field="max_output_tokens",
        )

    def writer(self, model: str, tokenizer: Tokenizer | None) -> ResponseWriter:
        """Returns the writer of the answer of `model`."""
        return ResponseWriter(Style(model, False, False, self.return_sources), self)

    def messages(self) -> list[Message]:
        """The messages of the input, without instructions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [item.message() for item in self.input]


class ResponseWriter(CompletionWriter):
    """response objects, whole or as the documented events. One reply, one message, one part."""

    ID = "resp_"

    def __init__(self, style: Style, body: ResponseBody):
        super().__init__(style)
        self._body = body
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._events = 0

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,) = replies
        done = reply.finish is FinishReason.STOP
        status, details = (
            ("completed", None) if done else ("incomplete", {"reason": "max_output_tokens"})
        )
        counts = usage(replies, self._style.sources)
        return self._response(status) | {
            "incomplete_details": details,
            "output": [self._item(status, [_part("".join(reply.texts))])],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }

    def stored(self, replies: Sequence[Reply]) -> str | None:
        return json.dumps(self.whole(replies)) if self._body.store else None

    def opening(self, replies: Sequence[Reply]) -> str:
        started = self._response("in_progress")
        return "".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event(
                    "response.output_item.added", output_index=0, item=self._item("in_progress", [])
                ),
                self._event("response.content_part.added", **self._place(), part=_part("")),
            )
        )

    def piece(self, index: int, piece: Piece, finish: str | None) -> str:
        if not piece.text:
            return ""
        return self._event(
            "response.output_text.delta", **self._place(), delta=piece.text, logprobs=[]
        )

    def closing(self, replies: Sequence[Reply]) -> str:
        whole = self.whole(replies)
        (item,) = whole["output"]
        (part,) = item["content"]
        return "".join(
            (
                self._event(
                    "response.output_text.done", **self._place(), text=part["text"], logprobs=[]
                ),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{whole['status']}", response=whole),
            )
        )

    def failure(self, error: RequestError) -> str:
        """Uses OpenAI's code `server_error`: a client's errors are refused before a stream
        begins."""
        what = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed") | {"error": what})

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "conversation": {"id": body.conversation_id}
            if body.conversation_id is not None
            else None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._style.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "auto" if body.truncates else "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def add_responses(app: FastAPI, histories: TurnManager) -> None:
    """Adds the endpoints of stored responses."""
    router = APIRouter(prefix="/v1/responses")

    @router.get("/{id}")
    async def look(id: str, request: Request) -> dict[str, Any]:
        stored = await histories.get(Name(owner_of(request), id, "response"))
        assert stored.body is not None
        return dict(json.loads(stored.body))

    @router.delete("/{id}")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        await histories.delete(Name(owner_of(request), id, "response"))
        return {"id": id, "object": "response", "deleted": True}

    app.include_router(router)
