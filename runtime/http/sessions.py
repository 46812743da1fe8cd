"""DELETE /v1/sessions/{id}: the explicit end of a session."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from ..conversations.sessions import Sessions
from .auth import owner_of


def add_sessions(app: FastAPI, sessions: Sessions) -> None:
    """Adds the endpoint. An id may contain slashes (`conversations.AnyId`)."""

    @app.delete("/v1/sessions/{id:any}")
    async def end(id: str, request: Request) -> dict[str, Any]:
        await sessions.end((owner_of(request), id))
        return {"id": id, "object": "session.deleted", "deleted": True}
