"""DELETE /v1/sessions/{id}: the explicit end of a session."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from ..conversations.turns import TurnManager
from .auth import owner_of


def add_sessions(app: FastAPI, histories: TurnManager) -> None:
    """Adds the endpoint. An id may contain slashes (`conversations.AnyId`)."""

    @app.delete("/v1/sessions/{id:any}")
    async def end(id: str, request: Request) -> dict[str, Any]:
        key = (owner_of(request), id)
        histories.prompts.forget(key)
        await histories.sessions.end(key)
        return {"id": id, "object": "session.deleted", "deleted": True}
