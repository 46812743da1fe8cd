"""What the HTTP process and the loop's process say to each other, over one pipe each way.

HTTP -> loop: one message a request event (`Submit`, `Abort`, `Finish`); `Drain` is the loop's own, from a signal.
Loop -> HTTP: one `StepMessage` a step that brought anything; `Ready` once at the start; `Fatal` if the loop dies.
All are plain picklable data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..scheduler.types import Output, Request, RequestError, RequestId, SchedulerStats


class Submit(NamedTuple):
    """Answered by an `Output` or a `Refusal` of the same request id."""

    request: Request


class Abort(NamedTuple):
    """The client is gone: the turn is not committed and nothing more is said about the request."""

    request: RequestId


class Finish(NamedTuple):
    """The reply ends after its first `tokens` tokens.

    Sent for every request with `confirm`, either while it runs (a stop string matched) or after its last `Output`
    (nothing matched: all tokens stay). The turn is committed then; answered by an `Output` with `finish` if the
    request was still running.
    """

    request: RequestId
    tokens: int


class Drain(NamedTuple):
    """Accept nothing more; finish what runs within `seconds`, then abort the rest and end."""

    seconds: float


class Refusal(NamedTuple):
    request: RequestId
    error: RequestError


class KVCounters(NamedTuple):
    """Bytes copied since the start, by direction."""

    swap_in: int = 0
    swap_out: int = 0


@dataclass(frozen=True, slots=True)
class StepMessage:
    """`tokens[i]` is a new token of `requests[i]`, at most one a request. `events` go with them: first usage, ends."""

    requests: Sequence[int] = ()
    tokens: Sequence[int] = ()
    events: tuple[Output, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    stats: SchedulerStats | None = None
    copied: KVCounters | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The loop serves. `stop_ids`: end-of-sequence tokens; `tokenizer`: the engine's tokenizer directory."""

    model: str
    max_model_len: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    tokenizer: str


class Fatal(NamedTuple):
    """The loop stopped because of a broken invariant; every open request ends with this reason."""

    reason: str
