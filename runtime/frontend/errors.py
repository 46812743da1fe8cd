"""A RequestError as its client sees it: OpenAI's error object, a status, and when to come back."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from ...scheduler.types import INSUFFICIENT_QUOTA, RequestError

RETRY_SECONDS = 1  # told to clients that come at a bad moment


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's form."""
    kind, code = "invalid_request_error", error.code
    if error.status == 429 and code == INSUFFICIENT_QUOTA:
        kind = INSUFFICIENT_QUOTA
    elif error.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif error.status == 401:
        code = "invalid_api_key"
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def error_response(error: RequestError) -> JSONResponse:
    passes = error.status in (429, 503) and error.code != INSUFFICIENT_QUOTA
    headers = {"retry-after": str(RETRY_SECONDS)} if passes else None
    return JSONResponse(error_object(error), error.status, headers)
