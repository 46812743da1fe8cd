"""The served models: GET /v1/models and /v1/models/{name}, in OpenAI's form or Anthropic's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from ..frontend.errors import ANTHROPIC_VERSION
from ..frontend.request_builder import check_model
from ..messages import Ready


def add_models(app: FastAPI, ready: Ready) -> None:
    """Adds the endpoints. All models are on one page."""
    created = int(time.time())

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        names = [ready.model, *ready.aliases]
        data = [described(name, request) for name in names]
        if ANTHROPIC_VERSION not in request.headers:
            return {"object": "list", "data": data}
        return {"data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        check_model(name, ready)
        return described(name, request)

    def described(name: str, request: Request) -> dict[str, Any]:
        if ANTHROPIC_VERSION in request.headers:
            return {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "max_input_tokens": ready.max_model_len,
                "max_tokens": ready.max_model_len,
                "lifecycle": "active",
            }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pensieve",
            "max_model_len": ready.max_model_len,
        }
