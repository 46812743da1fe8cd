"""Writes one log line for each call when it ends in any way: counts and times, but no text."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator

from ...scheduler.types import RequestError
from .engine_client import ClientGone
from .reply import Reply, usage
from .request_builder import GenerationCall

OWNER_DIGITS = 8  # digits of a key's digest, enough to tell owners apart

log = logging.getLogger(__name__)


@contextlib.contextmanager
def logged(call: GenerationCall, owner: str, replies: Collection[Reply]) -> Iterator[None]:
    """Wraps the answering of a call; `owner` as in `auth`. `replies` may be filled meanwhile."""
    unfinished, status = "error", None
    try:
        yield
    except ClientGone:
        unfinished = "abort"
        raise
    except RequestError as error:
        unfinished, status = "refused", error.status
        raise
    finally:
        _log(call, owner, replies, unfinished, status)


def _log(call: GenerationCall, owner: str, replies: Collection[Reply], unfinished: str, status: int | None) -> None:
    """`unfinished`: the finish reason of replies that have none. Times count from the call's arrival."""
    now, counts = time.perf_counter(), usage(list(replies))
    records = call.turn.records if call.turn is not None else ()
    started = [reply.started for reply in replies if reply.started is not None]
    fields = {
        "id": call.writer.id,
        "owner": owner[:OWNER_DIGITS] or None,
        "conversation": records[0].name.id if records else None,
        "session": call.session,
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "generated_tokens": counts["completion_tokens"],
        "finish": ",".join(dict.fromkeys(reply.finish or unfinished for reply in replies)) or unfinished,
        "status": status,
        "queue_ms": _milliseconds(max((reply.queued for reply in replies), default=0.0)),
        "ttft_ms": _milliseconds(min(started) - call.arrived) if started else None,
        "total_ms": _milliseconds(now - call.arrived),
    }
    log.info("request", extra={"fields": fields})


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)
