"""Conversations as objects: create, list, show, fork, pin, change their lifetime, delete.

All paths need the owner's key if keys are used. Another owner's conversation is answered as one
that does not exist.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field
from starlette.convertors import PathConvertor, StringConvertor, register_url_convertor

from ...scheduler.types import ErrorKind, RequestError
from ..conversations.schema import Name, StoredConversation
from ..conversations.transcript import Message, Transcript, without_ids
from ..conversations.turns import TurnManager, kv_name
from ..frontend.bodies import parse
from ..frontend.body_base import Body, ConversationId
from ..frontend.engine_client import EngineClient
from .auth import owner_of
from .conversation_items import (
    AddedItems,
    Item,
    Metadata,
    added_items,
    items_of,
    no_item,
    with_messages,
    without_item,
)
from .json_response import json_response
from .request_body import read_body
from .response_items import ITEM_IDS, Input, ReferenceItem, messages_of

LONGEST_PAGE = 100
LONGEST_BODY = 64 * 1024  # bytes: an id of 1,000 characters takes at most 12,000
DEFAULT_PIN_S = 3600.0

Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=False)]


class ForkBody(Body):
    """POST /v1/conversations/{id}/fork."""

    id: ConversationId | None = None


class NewConversation(ForkBody):
    """POST /v1/conversations."""

    items: Input = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)

    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Refuses every unknown field, as `ttl_s`: only those within items are ignored."""
        super()._ignore(name, None)


class ConversationChange(Body):
    """POST or PATCH /v1/conversations/{id}: null is the server's default, or no metadata; an absent
    field stays unchanged."""

    OWN: ClassVar = frozenset({"ttl_s", "history_ttl_s"})
    KEEPS_NULL: ClassVar = True

    ttl_s: Seconds | None = None
    history_ttl_s: Seconds | None = None
    metadata: Metadata | None = None


class Pin(Body):
    """POST /v1/conversations/{id}/pin."""

    OWN: ClassVar = frozenset({"ttl_s"})

    ttl_s: Seconds = DEFAULT_PIN_S


class AnyId(PathConvertor):
    """The rest of a path, line breaks included. Starlette's `path` matches none, and ignores one at
    the end."""

    regex = "(?s:.*)"


class ItemId(StringConvertor):
    """An item's id in a path; a path that ends in something else names a conversation."""

    regex = f"(?:{'|'.join(ITEM_IDS.values())})[^/]+"


register_url_convertor("any", AnyId())
register_url_convertor("item", ItemId())


class Page:
    """Query of a list. Raises RequestError (400)."""

    def __init__(self, request: Request, *ignored: str):
        query = request.query_params
        for name in query:
            if name not in ("limit", "after", "order", *ignored):
                raise RequestError(
                    ErrorKind.INVALID, f"{name} is not a parameter that this server knows", name
                )
        self.after = query.get("after")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(
                ErrorKind.INVALID, f"order must be asc or desc, not {order!r}", "order"
            )
        self.ascending = order == "asc"
        limit = query.get("limit", "20")
        if not (
            limit.isascii()
            and limit.isdigit()
            and len(limit) < 10
            and 1 <= int(limit) <= LONGEST_PAGE
        ):
            raise RequestError(
                ErrorKind.INVALID,
                f"limit must be a number from 1 to {LONGEST_PAGE}, not {limit[:10]!r}",
                "limit",
            )
        self.limit = int(limit)

    def of(self, items: Sequence[Item]) -> dict[str, Any]:
        """The page of these items, which are in ascending order. Raises RequestError (NOT_FOUND)
        for an unknown `after`."""
        ordered = items if self.ascending else items[::-1]
        start = 0
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise no_item(self.after, "after")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return listed(ordered[start:end], end < len(ordered))


def listed(objects: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A page of a list in OpenAI's form. `more`: whether there are more objects behind it."""
    ends = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {
        "object": "list",
        "data": list(objects),
        "first_id": ends[0],
        "last_id": ends[1],
        "has_more": more,
    }


def add_conversations(
    app: FastAPI, histories: TurnManager, client: EngineClient, most_bytes: int
) -> None:
    """Adds the endpoints. An id may contain slashes, so paths with a part after the id come first.
    `most_bytes`: of a conversation to which items are added."""
    router = APIRouter(prefix="/v1/conversations")

    def described(
        conversation: StoredConversation, transcript: Transcript | None = None
    ) -> dict[str, Any]:
        return describe(conversation, histories.now(), transcript)

    def sized(
        conversation: StoredConversation, transcript: Transcript | None = None
    ) -> dict[str, Any]:
        residency = client.kv_map.find(
            kv_name(Name(conversation.owner, conversation.id), conversation.thread)
        )
        return described(conversation, transcript) | {
            "kv_chunks": None if residency is None else residency.chunks
        }

    @router.get("")
    async def page(request: Request) -> dict[str, Any]:
        page = Page(request)
        conversations, more = await histories.page(
            owner_of(request), page.limit, page.after, page.ascending
        )
        await client.refresh_all()
        return listed([sized(conversation) for conversation in conversations], more)

    @router.post("")
    async def create(request: Request) -> dict[str, Any]:
        body = (
            await read_body(NewConversation, request) if await request.body() else NewConversation()
        )
        messages = await asyncio.to_thread(new_messages, body.items)
        name = Name(owner_of(request), body.id or new_id())
        metadata = json.dumps(body.metadata) if body.metadata else None
        return described(await histories.create(name, messages, metadata))

    @router.get("/{id:any}/items")
    async def list_items(id: str, request: Request) -> Response:
        page = Page(request, "include", "include[]")
        _, transcript = await histories.load(Name(owner_of(request), id))
        return await asyncio.to_thread(
            lambda: json_response(page.of(items_of(transcript.messages)))
        )

    @router.post("/{id:any}/items")
    async def add_items(id: str, request: Request) -> Response:
        body = await read_body(AddedItems, request)
        messages = await asyncio.to_thread(new_messages, body.items)
        dialogues: list[Sequence[Message]] = []  # before and after

        def add(before: Sequence[Message]) -> Sequence[Message]:
            dialogues[:] = before, with_messages(before, messages, most_bytes)
            return dialogues[1]

        await histories.edit(Name(owner_of(request), id), add)
        return await asyncio.to_thread(
            lambda: json_response(listed(added_items(*dialogues), False))
        )

    @router.get("/{id:any}/items/{item:item}")
    async def look_at_item(id: str, item: str, request: Request) -> dict[str, Any]:
        _, transcript = await histories.load(Name(owner_of(request), id))
        for listed_item in await asyncio.to_thread(items_of, transcript.messages):
            if listed_item["id"] == item:
                return listed_item
        raise no_item(item, "item_id")

    @router.delete("/{id:any}/items/{item:item}")
    async def delete_item(id: str, item: str, request: Request) -> dict[str, Any]:
        change = partial(without_item, id=item)
        return described(await histories.edit(Name(owner_of(request), id), change))

    @router.post("/{id:any}/fork")
    async def fork(id: str, request: Request) -> dict[str, Any]:
        body = await parsed(ForkBody, request)
        return described(await histories.fork(Name(owner_of(request), id), body.id or new_id()))

    @router.post("/{id:any}/pin")
    async def pin(id: str, request: Request) -> dict[str, Any]:
        body = await parsed(Pin, request)
        until = histories.now() + body.ttl_s
        return described(await histories.change(Name(owner_of(request), id), pinned_until=until))

    @router.post("/{id:any}/unpin")
    async def unpin(id: str, request: Request) -> dict[str, Any]:
        return described(await histories.change(Name(owner_of(request), id), pinned_until=0.0))

    @router.get("/{id:any}")
    async def look(id: str, request: Request) -> dict[str, Any]:
        name = Name(owner_of(request), id)
        # first: messages that are read after the end of a turn contain it
        in_flight = await histories.in_flight(name)
        conversation, transcript = await histories.load(name)
        await client.refresh_all()
        return sized(conversation, transcript) | {"in_flight": in_flight}

    @router.post("/{id:any}")
    @router.patch("/{id:any}")
    async def change(id: str, request: Request) -> dict[str, Any]:
        body = await parsed(ConversationChange, request)
        values = {name.removesuffix("_s"): getattr(body, name) for name in body.model_fields_set}
        if "metadata" in values:
            values["body"] = json.dumps(values.pop("metadata") or {})
        return described(await histories.change(Name(owner_of(request), id), **values))

    @router.delete("/{id:any}")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        await histories.delete(Name(owner_of(request), id))
        return {"id": id, "object": "conversation.deleted", "deleted": True}

    app.include_router(router)


def new_messages(items: Input) -> list[Message]:
    """The messages of added items. Raises RequestError (INVALID) for a reference."""
    if any(isinstance(item, ReferenceItem) for item in items):
        reason = "an item_reference cannot be added to a conversation: send the whole item"
        raise RequestError(ErrorKind.INVALID, reason, "items")
    return [message.for_template() for message in messages_of(items)]


async def parsed(kind: Any, request: Request) -> Any:
    """Reads the body as this kind; no body is an empty one. RequestError: 400 as `parse`, 413 for a
    long body: it is parsed in the event loop's thread, and all other requests wait meanwhile."""
    body = await request.body() or b"{}"
    if len(body) > LONGEST_BODY:
        raise RequestError(
            ErrorKind.TOO_LARGE, f"the body is longer than the {LONGEST_BODY} bytes allowed here"
        )
    return parse(kind, body)


def new_id() -> str:
    return f"conv_{uuid.uuid4().hex}"


def describe(
    conversation: StoredConversation, now: float, transcript: Transcript | None = None
) -> dict[str, Any]:
    """The conversation in the form for its owner, with the messages if `transcript` is given."""
    pinned = conversation.pinned_until if conversation.pinned_until > now else None
    described: dict[str, Any] = {
        "id": conversation.id,
        "object": "conversation",
        "title": conversation.title,
        "created_at": int(conversation.created),
        "last_active_at": int(conversation.active),
        "tokens": conversation.tokens,
        "parent": conversation.parent,
        "ttl_s": conversation.ttl,
        "history_ttl_s": conversation.history_ttl,
        "pinned_until": int(pinned) if pinned is not None else None,
        "metadata": json.loads(conversation.body or "{}"),
    }
    if transcript is not None:
        described["messages"] = without_ids(transcript.messages)
    return described
