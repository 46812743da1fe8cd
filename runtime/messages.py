"""What the HTTP process and the loop's process say to each other, over one pipe each way.

HTTP -> loop: one message a request event (`Submit`, `Abort`, `Finish`) or change of a conversation (`Fork`, `Forget`,
`Keep`), `Look` while somebody looks; `Drain` is the loop's own, from a signal.
Loop -> HTTP: one `StepMessage` a step that brought anything; `Ready` once at the start; `Draining` when it accepts
nothing more; `Residency` for a `Look`; `Erased` for a `Forget`; `Fatal` if the loop dies.
All are plain picklable data.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..scheduler.types import Output, Request, RequestError, RequestId, Residency, SchedulerStats, TokenLogprobs


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


class Fork(NamedTuple):
    """A second conversation with the same KV. Nothing happens if the loop does not know the first one."""

    conversation: str
    new: str


class Forget(NamedTuple):
    """The conversation claims no KV any more, and nobody may read what was its own: of its log of `tokens` with this
    salt what is behind the first `shared` tokens. The loop may not know it (or nobody is to be forgotten: None), but
    have its KV on disk. Answered by `Erased`."""

    conversation: str | None
    tokens: array[int]
    shared: int
    salt: bytes


class Keep(NamedTuple):
    """How long the conversation's KV is claimed after its last turn (None: the server's default), in seconds, and for
    how many more seconds it is evicted last. The loop may not know it."""

    conversation: str
    ttl: float | None
    pinned: float


class Erased(NamedTuple):
    """To each `Forget`, in their order: nobody can read what was its own any more, on any rank, not even after a loss
    of power. Not `wholly`: the disk refused to erase something."""

    wholly: bool


class Look(NamedTuple):
    """Somebody looks: answered by a `Residency` of the conversations from number `start` on."""

    start: int


class Drain(NamedTuple):
    """Accept nothing more; finish what runs within `seconds`, then abort the rest and end."""

    seconds: float


FromHTTP = Submit | Abort | Finish | Fork | Forget | Keep | Look | Drain


class Refusal(NamedTuple):
    """The request has ended, or not even begun, for this reason; its turn is not committed."""

    request: RequestId
    error: RequestError


class KVCounters(NamedTuple):
    """Bytes copied since the start, by direction."""

    swap_in: int = 0
    swap_out: int = 0


class DiskCounters(NamedTuple):
    """Of one rank's disk tier since the start, in records; `saving`, `loading` and `full` are of now.

    saving, loading     on their way to the disk and from it
    saving_seconds, loading_seconds
                        from the plan that asked for it to its end, summed over records
    saving_queued, loading_queued
                        of that, before a thread began with them
    rejected            records that were read and are not intact, or another's
    errors              times the system refused to read, write, or make room
    full                1 while nothing is saved because the disk is full
    """

    saving: int = 0
    loading: int = 0
    saved: int = 0
    loaded: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    saving_seconds: float = 0.0
    loading_seconds: float = 0.0
    saving_queued: float = 0.0
    loading_queued: float = 0.0
    rejected: int = 0
    errors: int = 0
    full: int = 0


class PowerCounts(NamedTuple):
    """A histogram: `counts[k]` sizes were above 2**(k-1) and at most 2**k; together they are `total`."""

    counts: tuple[int, ...] = ()
    total: int = 0


NO_SIZES = PowerCounts()


class Waits(NamedTuple):
    """How long so many copies together have waited between being issued and beginning."""

    seconds: float = 0.0
    copies: int = 0


NO_WAITS = Waits()


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Of the loop and its device, since the start; times in seconds.

    parts               the loop's own time by part of a step: plan, launch, wait, apply, send
    tokens, requests    sizes of the steps that computed anything
    busy                time with work on the device, as the loop sees it: from a launch until nothing is in flight
    swap_in, swap_out   the link's time, by direction
    exposed             of that, what steps waited for; the rest was hidden behind compute
    queued_in, queued_out
                        what copies waited for the link, and for what their lane waits for, by direction
    """

    steps: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: PowerCounts = NO_SIZES
    requests: PowerCounts = NO_SIZES
    busy: float = 0.0
    swap_in: float = 0.0
    swap_out: float = 0.0
    exposed: float = 0.0
    queued_in: Waits = NO_WAITS
    queued_out: Waits = NO_WAITS


@dataclass(frozen=True, slots=True)
class StepMessage:
    """`tokens[i]` is a new token of `requests[i]`, at most one a request, in the plan's order: of rows that generate,
    then of prompts. `events` go with them: first usage, ends.

    `logprobs` (of the new tokens) and `prompt_logprobs` by request, of those that asked for them.
    """

    requests: Sequence[int] = ()
    tokens: Sequence[int] = ()
    events: tuple[Output, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    stats: SchedulerStats | None = None
    copied: KVCounters | None = None
    disk: DiskCounters | None = None
    loop: LoopStats | None = None
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """The loop serves. `stop_ids`: end-of-sequence tokens; `tokenizer`: the engine's tokenizer directory.

    `model` is the name that replies carry; `aliases` may be asked for as well. `overflow`: contexts may outgrow
    `max_model_len` where a request allows it.
    """

    model: str
    max_model_len: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    tokenizer: str
    aliases: tuple[str, ...] = ()
    overflow: bool = True


class Draining(NamedTuple):
    """The loop accepts nothing more and finishes what it has."""


class Fatal(NamedTuple):
    """The loop stopped because of a broken invariant; every open request ends with this reason."""

    reason: str


ToHTTP = Ready | StepMessage | Draining | Residency | Erased | Fatal
