"""A RequestError in the form for clients: OpenAI's or Anthropic's error object, a status, and when
to retry."""

from __future__ import annotations

import logging
from typing import Any

from fastapi.responses import JSONResponse

from ...scheduler.types import INSUFFICIENT_QUOTA, ErrorKind, RequestError

log = logging.getLogger(__name__)

RETRY_SECONDS = 1  # sent to clients with errors that pass by themselves
MOST_LOGGED = 200  # characters of a path and of a reason
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_VERSION = "anthropic-version"  # a header that Anthropic's clients send
STATUS = {
    ErrorKind.INVALID: 400,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.TOO_MANY: 429,
    ErrorKind.INTERNAL: 500,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.STORAGE_FULL: 507,
}
"""The HTTP status of each kind of error."""
ANTHROPIC_TYPES = {
    ErrorKind.INVALID: "invalid_request_error",
    ErrorKind.UNAUTHENTICATED: "authentication_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.CONFLICT: "invalid_request_error",
    ErrorKind.TOO_LARGE: "request_too_large",
    ErrorKind.TOO_MANY: "rate_limit_error",
    ErrorKind.INTERNAL: "api_error",
    ErrorKind.UNAVAILABLE: "overloaded_error",
    ErrorKind.STORAGE_FULL: "api_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's form."""
    kind = "invalid_request_error"
    code = error.code
    if error.kind == ErrorKind.TOO_MANY and code == INSUFFICIENT_QUOTA:
        kind = INSUFFICIENT_QUOTA
    elif error.kind == ErrorKind.TOO_MANY:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    elif error.kind == ErrorKind.UNAUTHENTICATED:
        code = "invalid_api_key"
    elif STATUS[error.kind] >= 500:
        kind = "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.subject, "code": code}}


def anthropic_error_object(error: RequestError) -> dict[str, Any]:
    """Anthropic's form, in which the message names the field."""
    message = error.message
    if error.subject is not None and error.subject not in message:
        message = f"{error.subject}: {message}"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES[error.kind], "message": message}}


def logged_reason(error: RequestError) -> str:
    """The message up to its first colon: libraries' messages behind it may quote the request's
    text. What follows the place of a field quotes none."""
    beginning, _, _ = error.message.partition(": ")
    return (beginning if " " in beginning else error.message)[:MOST_LOGGED]


def error_response(
    error: RequestError, path: str, status: int | None = None, *, to_anthropics: bool = False
) -> JSONResponse:
    """The answer to a request for `path`: below `ANTHROPIC_PATH` in Anthropic's form. It is logged.

    `status`: another one than that of the error's kind. `to_anthropics`: to a client of
    Anthropic's, which reads Anthropic's form from each path.
    """
    status = STATUS[error.kind] if status is None else status
    fields = {"status": status, "path": path[:MOST_LOGGED], "reason": logged_reason(error)}
    log.info("refused", extra={"fields": fields})
    passes = (
        error.kind in (ErrorKind.TOO_MANY, ErrorKind.UNAVAILABLE)
        and error.code != INSUFFICIENT_QUOTA
    )
    headers = {"retry-after": str(RETRY_SECONDS)} if passes else None
    to_anthropics = to_anthropics or path.startswith(ANTHROPIC_PATH)
    form = anthropic_error_object if to_anthropics else error_object
    return JSONResponse(form(error), status, headers)
