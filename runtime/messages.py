"""Messages between the HTTP process and the loop's process, over one pipe in each direction.

HTTP -> loop: one message for each request event (`Submit`, `Abort`, `Finish`) or change of a
conversation (`Fork`, `Forget`, `Keep`); `Look` while the page is open. The loop sends `Drain` to
itself after a signal. Loop -> HTTP: one `StepMessage` for each step with results; `Ready` once at
the start; `Draining` when it refuses new requests; `Residency` for a `Look`; `Erased` for a
`Forget`; `Fatal` if the loop dies. All are plain picklable data.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from ..scheduler.kv.stats import SchedulerStats
from ..scheduler.types import Applied, Erasure, Request, RequestId, Residency
from .counters import DiskCounters, KVCounters, KVEventCounters, LoopStats, SharedCounters


class Submit(NamedTuple):
    """A new request. Answered by `RowResult`s of the same request id. Those of one call are sent as
    one list: pickle then sends one copy of a prompt that they share."""

    request: Request


class Abort(NamedTuple):
    """The client is gone. The turn is not committed, and no further message about the request is
    sent."""

    request: RequestId


class Finish(NamedTuple):
    """The reply ends after its first `tokens` tokens.

    Sent for every request with `confirm`, either while it runs (a stop string matched) or after its
    last `RowResult` (nothing matched: all tokens stay). The turn is committed then; answered by an
    `RowResult` with `finish` if the request was still running.
    """

    request: RequestId
    tokens: int


class Fork(NamedTuple):
    """Makes a second conversation with the same KV. No effect if the loop does not know the first
    one."""

    conversation: str
    new: str


class Forget(NamedTuple):
    """Ends the conversation's claims and erases its own KV: of its log of `tokens` with this salt,
    the part after the first `shared` tokens. `conversation` is None if only KV is to be erased. The
    loop may not know the conversation and still have its KV on disk. After an edit the conversation
    goes on with the first `kept` tokens, at most `shared`, and its claims on them stay. Answered by
    `Erased`."""

    conversation: str | None
    tokens: array[int]
    shared: int
    salt: bytes
    kept: int = 0


class Keep(NamedTuple):
    """Sets how long the conversation's KV is claimed after its last turn (None: the server's
    default), and for how long from now it is evicted last; seconds. The loop may not know the
    conversation."""

    conversation: str
    ttl: float | None
    pinned: float


class Erased(NamedTuple):
    """Answer to each `Forget`, in order: the conversation's own KV cannot be read any more, on any
    rank, even after a power failure; or a tier refused to erase a part."""

    erasure: Erasure


class Look(NamedTuple):
    """Answered by a `Residency` of the conversations from number `start` on. Sent while the page is
    open."""

    start: int


class Drain(NamedTuple):
    """Refuse new requests; finish running ones within `seconds`, then abort the rest and end."""

    seconds: float


FromHTTP = Submit | Abort | Finish | Fork | Forget | Keep | Look | Drain


class StepMessage(NamedTuple):
    """The results of a step, or of what happened between two steps. Statistics are there when a
    request begins or ends, and at regular intervals."""

    applied: Applied = Applied()
    stats: SchedulerStats | None = None
    copied: KVCounters | None = None
    disk: DiskCounters | None = None
    shared: SharedCounters | None = None
    loop: LoopStats | None = None
    kv_events: KVEventCounters | None = None


class SamplingDefaults(NamedTuple):
    """The sampling of requests that do not set these fields. `max_tokens`: no reply is longer;
    None: the context alone limits replies."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


SAMPLING_DEFAULTS = SamplingDefaults()  # the APIs' own


@dataclass(frozen=True, slots=True)
class Ready:
    """The loop serves. `stop_ids`: end-of-sequence tokens; `tokenizer`: the engine's tokenizer
    directory.

    `model` is the name in replies; requests may use `aliases` as well. `overflow`: contexts may
    outgrow `max_model_len` if their requests allow it. The GPU's pool holds `gpu_kv_chunks` chunks
    of `chunk_tokens` tokens.
    `device`: where the engine runs, one of DEVICES. `states`: the model has recurrent states.
    """

    model: str
    max_model_len: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    tokenizer: str
    chunk_tokens: int
    gpu_kv_chunks: int
    aliases: tuple[str, ...] = ()
    overflow: bool = True
    sampling: SamplingDefaults = SAMPLING_DEFAULTS
    device: str = "cpu"
    states: bool = False


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """The settings of Triton's model, sent as the first message.

    histories, server, history_ttl, max_conversations_per_owner, log_format, log_level
                    as in `HTTPSettings`
    end_seconds     the longest time from SIGTERM to the end of the engine's process
    """

    histories: str
    server: str | None
    history_ttl: float | None
    max_conversations_per_owner: int | None
    log_format: str
    log_level: str
    end_seconds: float


class Draining(NamedTuple):
    """The loop refuses new requests and finishes the open ones."""


class Fatal(NamedTuple):
    """The loop stopped because of a broken invariant; every open request ends with this reason."""

    reason: str


ToHTTP = Ready | StepMessage | Draining | Residency | Erased | Fatal
