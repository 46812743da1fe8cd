"""The endpoints of stored responses (OpenAI's Responses API).

A stored response is the state of a conversation that never changes: any number of later ones may go on from it.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from ..conversations.schema import Name
from ..conversations.turns import TurnManager
from .auth import owner_of


def add_responses(app: FastAPI, histories: TurnManager) -> None:
    """Adds the endpoints of stored responses."""
    router = APIRouter(prefix="/v1/responses")

    @router.get("/{id}")
    async def look(id: str, request: Request) -> dict[str, Any]:
        found = await histories.get(Name(owner_of(request), id, "response"))
        assert found.body is not None
        return dict(json.loads(found.body))

    @router.delete("/{id}")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        await histories.delete(Name(owner_of(request), id, "response"))
        return {"id": id, "object": "response", "deleted": True}

    app.include_router(router)
