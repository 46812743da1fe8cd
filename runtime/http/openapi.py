"""/openapi.json: the bodies of the endpoints. They read their bodies themselves, so FastAPI does
not know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..frontend.bodies import ChatBody, CompletionBody
from .conversation_items import AddedItems
from .conversations import ConversationChange, ForkBody, NewConversation, Pin
from .messages import MessageBody, PromptBody
from .responses import CountedBody, ResponseBody
from .tokenize import DetokenizeBody, TokenizeBody

CONVERSATION = "/v1/conversations/{id}"

BODIES: dict[tuple[str, str], type[BaseModel]] = {
    ("/v1/completions", "post"): CompletionBody,
    ("/v1/chat/completions", "post"): ChatBody,
    ("/v1/responses", "post"): ResponseBody,
    ("/v1/responses/input_tokens", "post"): CountedBody,
    ("/v1/messages", "post"): MessageBody,
    ("/v1/messages/count_tokens", "post"): PromptBody,
    ("/v1/completions/render", "post"): CompletionBody,
    ("/v1/chat/completions/render", "post"): ChatBody,
    ("/v1/messages/render", "post"): MessageBody,
    ("/tokenize", "post"): TokenizeBody,
    ("/detokenize", "post"): DetokenizeBody,
    ("/v1/conversations", "post"): NewConversation,
    (CONVERSATION, "post"): ConversationChange,
    (CONVERSATION, "patch"): ConversationChange,
    (f"{CONVERSATION}/fork", "post"): ForkBody,
    (f"{CONVERSATION}/items", "post"): AddedItems,
    (f"{CONVERSATION}/pin", "post"): Pin,
}
OPTIONAL = frozenset(
    {NewConversation, ForkBody, ConversationChange, Pin}
)  # no body is an empty one


def describe_bodies(app: FastAPI) -> None:
    """Makes `app.openapi()` describe the bodies. The document is built on first use."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _add_bodies(without_bodies())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(schema: dict[str, Any]) -> None:
    references, definitions = models_json_schema(
        [(kind, "validation") for kind in dict.fromkeys(BODIES.values())],
        ref_template="#/components/schemas/{model}",
    )
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    for (path, method), kind in BODIES.items():
        content = {"application/json": {"schema": references[kind, "validation"]}}
        schema["paths"][path][method]["requestBody"] = {
            "content": content,
            "required": kind not in OPTIONAL,
        }
