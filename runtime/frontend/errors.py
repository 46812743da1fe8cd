"""A RequestError in the form for clients: OpenAI's or Anthropic's error object, a status, and when
to retry."""

from __future__ import annotations

import logging
from typing import Any

from fastapi.responses import JSONResponse

from ...scheduler.types import INSUFFICIENT_QUOTA, RequestError

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # sent to clients with errors that pass by themselves
MOST_LOGGED = 200  # characters of a path and of a reason
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's form."""
    kind = "invalid_request_error"
    code = error.code
    if error.status == 429 and code == INSUFFICIENT_QUOTA:
        kind = INSUFFICIENT_QUOTA
    elif error.status == 429:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif error.status == 401:
        code = "invalid_api_key"
    elif error.status >= 500:
        kind = "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def anthropic_error_object(error: RequestError) -> dict[str, Any]:
    """Anthropic's form, in which the message names the field."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = ANTHROPIC_TYPES.get(
        error.status, "api_error" if error.status >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": message}}


def logged_reason(error: RequestError) -> str:
    """The message up to its first colon: libraries' messages behind it may quote the request's
    text. What follows the place of a field quotes none."""
    beginning, _, _ = error.message.partition(": ")
    return (beginning if " " in beginning else error.message)[:MOST_LOGGED]


def error_response(error: RequestError, path: str) -> JSONResponse:
    """The answer to a request for `path`: below `ANTHROPIC_PATH` in Anthropic's form. It is
    logged."""
    fields = {"status": error.status, "path": path[:MOST_LOGGED], "reason": logged_reason(error)}
    log.info("refused", extra={"fields": fields})
    passes = error.status in (429, 503) and error.code != INSUFFICIENT_QUOTA
    headers = {"retry-after": str(RETRY_SECONDS)} if passes else None
    form = anthropic_error_object if path.startswith(ANTHROPIC_PATH) else error_object
    return JSONResponse(form(error), error.status, headers)
