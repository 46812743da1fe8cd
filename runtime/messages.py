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
from .counters import DiskCounters, KVCounters, LoopStats


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


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """What Triton's model is told before anything else.

    histories, server, history_ttl, max_conversations_per_owner, log_format, log_level
                    as in `HTTPSettings`
    chunk_tokens    what Triton's clients call a block of the KV cache
    end_seconds     the longest time from SIGTERM to the end of the engine's process
    """

    histories: str
    server: str | None
    history_ttl: float | None
    max_conversations_per_owner: int | None
    log_format: str
    log_level: str
    chunk_tokens: int
    end_seconds: float


class Draining(NamedTuple):
    """The loop accepts nothing more and finishes what it has."""


class Fatal(NamedTuple):
    """The loop stopped because of a broken invariant; every open request ends with this reason."""

    reason: str


ToHTTP = Ready | StepMessage | Draining | Residency | Erased | Fatal
