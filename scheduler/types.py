"""Words shared by all rooms: tiers, requests, and the three kinds of failure (never mixed).

A wrong setting stops the start (`SettingError`), a bad request is answered to its client (`RequestError`),
a broken invariant stops every rank with its reason (`InvariantError`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

ChunkKey = NewType("ChunkKey", bytes)
"""SHA-256 over the previous chunk's key and the chunk's token ids: contains its whole prefix."""

RequestId = NewType("RequestId", int)


class SettingError(ValueError):
    """A setting cannot work; the message names it and says what would."""

    def __init__(self, setting: str, message: str):
        super().__init__(f"{setting}: {message}")
        self.setting = setting


class RequestError(ValueError):
    """A request cannot be served; its client is told why. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def __reduce__(self) -> tuple[type[RequestError], tuple[int, str, str | None]]:
        return RequestError, (self.status, self.message, self.param)


class InvariantError(AssertionError):
    """The program's own books disagree. Never caught: going on could return another conversation's tokens."""


class Tier(IntEnum):
    GPU = 0
    HOST = 1
    DISK = 2


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RowId(NamedTuple):
    """One stay of a request in a seat. Epochs are never used twice, so a stale result cannot be taken for a new one."""

    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn. Draw number p of seed s is a pure function of (s, p): resuming is exact.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filter off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise RequestError(400, f"temperature must be between 0 and 100, not {self.temperature}", "temperature")
        if self.top_k < 0:
            raise RequestError(400, f"top_k must not be negative, not {self.top_k}", "top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(400, f"top_p must be above 0 and at most 1, not {self.top_p}", "top_p")
        if not 0 <= self.seed < 2**63:
            raise RequestError(400, f"seed must be between 0 and 2**63 - 1, not {self.seed}", "seed")


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: its whole prompt (history included) and how to answer it.

    prompt          token ids, typecode "i"
    conversation    the conversation object to commit the turn to, or None: reuse by content alone
    max_tokens      most tokens to generate, at least 1
    min_tokens      `stop_ids` are ignored until this many tokens are generated
    stop_ids        generation ends with one of these (the stop id itself belongs to the reply)
    salt            requests with different salts share no KV
    confirm         the reply's length is confirmed by `Scheduler.finish` (a matcher of stop strings outside may cut
                    it); the turn is committed only then
    """

    id: RequestId
    prompt: array[int]
    max_tokens: int
    conversation: str | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    salt: bytes = b""
    confirm: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise RequestError(400, "the prompt is empty", "prompt")
        if self.max_tokens < 1:
            raise RequestError(400, f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                400,
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}",
                "min_tokens",
            )


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the KV of a prompt's tokens came from, each visible token counted once (DESIGN section 12, rule 9)."""

    gpu: int = 0
    host: int = 0
    disk: int = 0
    recomputed: int = 0
    new: int = 0

    @property
    def cached(self) -> int:
        return self.gpu + self.host + self.disk


@dataclass(frozen=True, slots=True)
class Output:
    """What one applied step brought one request: its new tokens, its `usage` with the first of them, its end."""

    request: RequestId
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the start (copies in chunks) and gauges of now; slots are (free, reclaimable, idle, in use)."""

    running: int = 0
    waiting: int = 0
    suspensions: int = 0
    dropped: int = 0
    swapped_in: int = 0
    swapped_out: int = 0
    conversations: int = 0
    slots: dict[str, dict[str, int]] = field(default_factory=dict)
