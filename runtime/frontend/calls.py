"""A call: its client, its requests, its end, and its log line.

The line is written when the call ends in any way: counts and times, but no text.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...scheduler.types import Request, RequestError
from ..conversations.turns import OpenTurn
from ..messages import Keep
from ..text.tokenizer import StopMatcher, Tokenizer
from .engine_client import ClientGone, OutputStream
from .errors import STATUS
from .generate import Generate
from .reply import CompletionWriter, Reply, usage
from .reply_forms import ReplyForms, Tail
from .reply_reader import Reader

OWNER_DIGITS = 8  # digits of a key's digest, enough to tell owners apart

log = logging.getLogger(__name__)

Claim = Callable[[int, str], Awaitable[None]]
"""Called with the number of sequences of a call. It replaces the one sequence that counts from the
call's start.

Raises RequestError: 400, which names the body's field, if the limit is lower; 429 if the client has
others open.
"""


async def claim_any(sequences: int, param: str) -> None:
    """A `Claim` without a limit."""


@dataclass(frozen=True)
class Caller:
    """The client of a call.

    owner   owner of everything that the call stores; sees no other owner's data; "" if no keys are
            needed
    share   owner of the requests for the engine: the key's owner, or without keys the client's
            address
    claim   as `Claim`
    session, affinity
            header's names for a series of its calls, or None: an explicit one, and one that others
            have precedence over. Their KV is kept as that of a conversation, but nothing is stored.
    """

    owner: str = ""
    share: str = ""
    claim: Claim = claim_any
    session: str | None = None
    affinity: str | None = None

    def session_of(self, generate: Generate) -> str | None:
        """The name of the session that the call belongs to: an explicit one before an affinity, the
        body's before a header's. With a marker alone a session without a name is kept."""
        names = (generate.session, self.session, generate.affinity, self.affinity)
        named = next((name for name in names if name), None)
        return "" if named is None and generate.keep_s is not None else named


@dataclass(frozen=True)
class GenerationCall:
    """A checked HTTP call: `requests` differ in their prompt only.

    `generate`: the body's wishes. `echoes`: text before each one's reply.
    `turn`: the turn that its first reply is committed to. The code that answers the call commits
    and closes it. `session`: the client's name for a series of calls; nothing is stored under it.
    `keep`: sent to the loop then, for the turn's KV. `held`: closed with the call.
    `forms`: divide a chat's replies into thoughts, content and calls. `tail`: of the prompt, or
    the message that the reply continues.
    `special_stops`: the stop strings that are tokens without a text, by their ids.
    """

    generate: Generate
    requests: tuple[Request, ...]
    echoes: tuple[str, ...]
    writer: CompletionWriter
    arrived: float
    turn: OpenTurn | None = None
    session: str | None = None
    keep: Keep | None = None
    forms: ReplyForms | None = None
    tail: Tail = ""
    special_stops: Mapping[int, str] = field(default_factory=dict)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def replies(self, stream: OutputStream, tokenizer: Tokenizer | None) -> list[Reply]:
        """Returns an empty reply to each request, in their order. Replies confirm their lengths to
        `stream`."""
        wishes = self.generate
        stops = [stop for stop in wishes.stops if stop not in self.special_stops.values()]
        return [
            Reply(
                request,
                stream,
                tokenizer,
                StopMatcher(stops, wishes.include_stop, request.min_tokens) if stops else None,
                continues_prompt=not wishes.chat or wishes.continue_final_message,
                include_stop=wishes.include_stop,
                reader=self._reader(),
                kept=self.forms.kept if self.forms is not None else {},
                echoed=echoed,
                stop_token_ids=wishes.stop_token_ids,
                special_stops=self.special_stops,
            )
            for request, echoed in zip(self.requests, self.echoes, strict=True)
        ]

    def _reader(self) -> Reader | None:
        if self.forms is None:
            return None
        wishes = self.generate
        return self.forms.reader(
            wishes.tools,
            wishes.most_tool_calls,
            self.tail,
            wishes.callable_names,
            wishes.continue_final_message,
        )

    async def commit(self, replies: Sequence[Reply]) -> None:
        """Makes the first reply's turn durable, if there is a turn. Called before any end is
        sent."""
        if self.turn is not None:
            first = replies[0]
            answer = first.message if self.generate.chat else None
            text = "".join(first.texts)
            stored = self.writer.stored(replies)
            if answer is not None and self.turn.in_conversation:
                answer |= self.writer.item_ids(replies)
            await self.turn.commit(first.tokens, text, answer, first.request.salt, stored)

    def close(self, replies: Iterable[Reply]) -> None:
        """Closes the turn, if there is one, and ends the request of its session. `replies`: as far
        as they have come."""
        self.held.close()
        if self.turn is None:
            return
        if (first := next(iter(replies), None)) is None:
            self.turn.close()
        else:
            self.turn.close(first.tokens, first.request.salt)


@contextlib.contextmanager
def watched(tell_end: Callable[[str, int | None], None]) -> Iterator[None]:
    """Wraps the answering of a call. `tell_end` gets the finish reason of replies that have none
    ("error", "abort" or "refused") and the status of a refusal."""
    unfinished = "error"
    status = None
    try:
        yield
    except ClientGone:
        unfinished = "abort"
        raise
    except RequestError as error:
        unfinished = "refused"
        status = STATUS[error.kind]
        raise
    finally:
        tell_end(unfinished, status)


@contextlib.contextmanager
def answering(
    call: GenerationCall,
    owner: str,
    replies: Collection[Reply],
    count: Callable[[float, Sequence[float]], None],
) -> Iterator[None]:
    """Wraps the answering of a call. At its end the call is counted (as by `Metrics.ended`) and
    logged, and its turn is closed. `owner` as in `auth`. `replies` may be filled meanwhile."""
    with watched(partial(_log, call, owner, replies)):
        try:
            yield
        finally:
            queued = [reply.queued for reply in replies if reply.started is not None]
            count(time.perf_counter() - call.arrived, queued)
            call.close(replies)


def _log(
    call: GenerationCall,
    owner: str,
    replies: Collection[Reply],
    unfinished: str,
    status: int | None,
) -> None:
    """Times count from the call's arrival."""
    now = time.perf_counter()
    counts = usage(list(replies))
    destinations = call.turn.destinations if call.turn is not None else ()
    started = [reply.started for reply in replies if reply.started is not None]
    fields = {
        "id": call.writer.id,
        "owner": owner[:OWNER_DIGITS] or None,
        "conversation": destinations[0].name.id if destinations else None,
        "session": call.session or None,
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "generated_tokens": counts["completion_tokens"],
        "finish": ",".join(dict.fromkeys(reply.finish or unfinished for reply in replies))
        or unfinished,
        "status": status,
        "queue_ms": _milliseconds(max((reply.queued for reply in replies), default=0.0)),
        "ttft_ms": _milliseconds(min(started) - call.arrived) if started else None,
        "total_ms": _milliseconds(now - call.arrived),
    }
    log.info("request", extra={"fields": fields})


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)
