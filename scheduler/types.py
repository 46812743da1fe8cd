"""Types shared by all packages: tiers, requests, and the three kinds of failure (never mixed).

A wrong setting stops the start (`SettingError`), a bad request is answered to its client
(`RequestError`), a broken invariant stops every rank with its reason (`InvariantError`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf
from typing import Any, NamedTuple, NewType, Protocol

ChunkKey = NewType("ChunkKey", bytes)
"""SHA-256 over the previous chunk's key and the chunk's token ids, so it stands for the whole
prefix."""

RequestId = NewType("RequestId", int)


class Tokens(Protocol):
    """Token ids: an array, or one that is made when it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> array[int]: ...


class SettingError(ValueError):
    """A setting cannot work; the message gives values that would.

    `setting` is its name. The message writes other settings' names in backquotes. A command line
    writes flags for both (`runtime/launch/settings.py`).
    """

    def __init__(self, setting: str, message: str):
        super().__init__(setting, message)  # as `pickle` passes them on
        self.setting = setting
        self.message = message

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"


class ErrorKind(StrEnum):
    """What is wrong with a request, or with the part that should serve it."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not found"
    CONFLICT = "conflict"  # with what exists, or with another request in flight
    TOO_LARGE = "too large"
    TOO_MANY = "too many"  # requests wait, or conversations exist
    UNAVAILABLE = "unavailable"  # passes by itself
    STORAGE_FULL = "storage full"
    INTERNAL = "internal"


class RequestError(ValueError):
    """A request cannot be served; the message goes to its client. `subject`: the field at fault.

    `code`: OpenAI's name for this kind of error, which client programs check.
    """

    def __init__(
        self, kind: ErrorKind, message: str, subject: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.subject = subject
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestError, (self.kind, self.message, self.subject, self.code)


INSUFFICIENT_QUOTA = "insufficient_quota"
"""OpenAI's `code` of a TOO_MANY that a retry does not cure."""


class InvariantError(AssertionError):
    """The program's own state is inconsistent. Never caught: going on could return another
    conversation's tokens."""


# (priority, number of the arrival): a request's permanent place, the smallest is first
QueuePlace = tuple[int, int]


class StoredRecord(NamedTuple):
    """A record that an earlier process left in a lower tier: of a keyed chunk, or a piece of a
    state, that ends at position `end`, used `age_s` seconds ago."""

    slot: int
    key: ChunkKey
    end: int
    age_s: float


class Tier(IntEnum):
    """The tiers of KV, the fastest first. All KV to and from the tiers below HOST passes through a
    HOST slot."""

    GPU = 0
    HOST = 1
    DISK = 2
    SHARED = 3


TIERS = tuple(Tier)
LOCAL_TIERS = TIERS[: Tier.SHARED]
"""The tiers of this server alone. A record in the shared tier may vanish at any time, so it is no
reason to give up a slot of these."""
LABELS = tuple(tier.name.lower() for tier in TIERS)
"""By tier: its name in metrics, in answers to clients, and as a field of `Usage`."""

GPU, HOST, DISK, SHARED = map(int, TIERS)
"""The same as plain numbers: each step indexes slots by tier, which takes twice the time with an
enum."""


class Erasure(IntEnum):
    """How the erasure of a deleted conversation's own records has ended."""

    REFUSED = 0  # this server's disk may keep a part until the next start
    WHOLLY = 1
    LATER = 2  # the store that servers share has refused a part, and is asked again without a call


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RowId(NamedTuple):
    """One stay of a request in a seat. Epochs are never used twice, so a stale result cannot be
    taken for a new one."""

    request: RequestId
    epoch: int


MOST_LOGPROBS = 20  # the limit of OpenAI and vLLM


def check_field(allowed: bool, name: str, rule: str, value: object) -> None:
    """Raises RequestError (INVALID) if the field's value is not allowed: it "must" follow the
    rule."""
    if not allowed:
        raise RequestError(ErrorKind.INVALID, f"{name} must {rule}, not {value}", name)


def check_logprobs(count: int | None, name: str) -> None:
    """Raises RequestError (INVALID) if that many of the likeliest tokens cannot be reported."""
    allowed = count is None or 0 <= count <= MOST_LOGPROBS
    check_field(allowed, name, f"be between 0 and {MOST_LOGPROBS}", count)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request. Draw number p with seed s is a pure function of (s, p), so
    resuming is exact.

    temperature             0 is greedy
    top_k, top_p, min_p     0, 1 and 0 switch the filter off
    repetition_penalty      logits of tokens in prompt or reply are divided by it, negative ones
                            multiplied; 1 is off
    presence_penalty        subtracted once from the logits of the tokens in the reply
    frequency_penalty       subtracted from the logits of the tokens in the reply, once for each
                            occurrence
    logit_bias              (token id, number to add to its logit)
    logprobs                None, or the number of likeliest tokens whose log probabilities are
                            reported, besides the drawn token's
    grammar                 the grammar that the reply must follow, in the form of
                            `runtime/step/grammar.py`
    bad_words               sequences of tokens: the last one is not drawn behind the others, unless
                            the grammar allows nothing else
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        temperature, top_p, min_p = self.temperature, self.top_p, self.min_p
        check_field(0.0 <= temperature <= 100.0, "temperature", "be between 0 and 100", temperature)
        check_field(self.top_k >= 0, "top_k", "not be negative", self.top_k)
        check_field(0.0 < top_p <= 1.0, "top_p", "be above 0 and at most 1", top_p)
        check_field(0 <= self.seed < 2**63, "seed", "be between 0 and 2**63 - 1", self.seed)
        check_field(0.0 <= min_p <= 1.0, "min_p", "be between 0 and 1", min_p)
        penalty = self.repetition_penalty
        within = 0.0 < penalty <= 100.0
        check_field(within, "repetition_penalty", "be above 0 and at most 100", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            check_field(-2.0 <= penalty <= 2.0, name, "be between -2 and 2", penalty)
        if not all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias):
            raise RequestError(
                ErrorKind.INVALID,
                "the values of logit_bias must be between -100 and 100",
                "logit_bias",
            )
        check_logprobs(self.logprobs, "logprobs")

    @property
    def penalised(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    @property
    def has_long_words(self) -> bool:
        """Whether some of `bad_words` have several tokens."""
        return any(len(word) > 1 for word in self.bad_words)

    @property
    def constrained(self) -> bool:
        """Whether the tokens before a draw decide which tokens it may give."""
        return self.grammar is not None or self.has_long_words


GREEDY = Sampling()


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before temperature, penalties, bias and
    grammar.

    logprob, rank           of the actual token; rank 1 is the likeliest
    top_ids, top_logprobs   the likeliest tokens, as many as were requested, the likeliest first
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: its whole prompt (history included) and the settings for its reply.

    prompt          token ids, typecode "i"
    conversation    id of the conversation to commit the turn to, or None: reuse by content alone
    max_tokens      most tokens to generate, at least 1
    min_tokens      the reply's first `min_tokens` tokens contain none of `stop_ids`, unless the
                    grammar allows nothing else
    stop_ids        generation ends with one of these (the stop id itself belongs to the reply)
    priority        smaller ones are served first, equal ones in order of arrival
    salt            requests with different salts share no KV
    confirm         the turn is committed only when `Scheduler.finish` confirms the reply's length
                    (the front end may cut the reply at a stop string)
    prompt_logprobs None, or the number of likeliest tokens whose log probabilities are reported for
                    each prompt token but the first, besides its own: the whole prompt is computed
                    again
    choice          number of this reply among several replies to one prompt; the prompt's tokens
                    are counted with choice 0
    truncate        the context may outgrow the model's length: then its leading tokens are no
                    longer seen
    owner           the owner of the conversation: its share of seats and steps, and its quota
    stored_tokens   leading prompt tokens that had KV in an earlier turn, perhaps in an earlier
                    process: if they are computed, they count as recomputed, not as new
    expect_next_s   seconds from the reply's end until the client expects to send its next turn, or
                    None
    marks           prompt positions, ascending, at which later prompts may part from this one, such
                    as the end of the last user message; () means the prompt's end. A state is kept
                    at or a little before each of them
    """

    id: RequestId
    prompt: array[int]
    max_tokens: int
    conversation: str | None = None
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    priority: int = 0
    salt: bytes = b""
    confirm: bool = False
    prompt_logprobs: int | None = None
    choice: int = 0
    truncate: bool = False
    expect_next_s: float | None = None
    owner: str = ""
    stored_tokens: int = 0
    marks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise RequestError(ErrorKind.INVALID, "the prompt is empty", "prompt")
        most, least, expected = self.max_tokens, self.min_tokens, self.expect_next_s
        check_field(most >= 1, "max_tokens", "be at least 1", most)
        check_field(
            0 <= least <= most, "min_tokens", f"be between 0 and max_tokens ({most})", least
        )
        check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        allowed = expected is None or 0.0 <= expected < inf
        check_field(allowed, "expect_next_s", "be 0 or more seconds", expected)


@dataclass(frozen=True, slots=True)
class Usage:
    """Sources of the KV of a prompt's tokens; each visible token is counted once
    (docs/design/scheduling.md)."""

    gpu: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    recomputed: int = 0
    new: int = 0

    @property
    def cached(self) -> int:
        return sum(getattr(self, label) for label in LABELS)


class RowResult(NamedTuple):
    """All that one step says of one row. It passes unchanged from the step to the code that writes
    the reply.

    tokens              the row's new tokens
    finish              the reply has ended, for this reason
    usage               comes with the first token
    queued              with `usage`: seconds from its arrival to its first seat
    truncated           with `usage` or `finish`: leading tokens of the context that its newest
                        token did not see
    error               the request has ended, or was never begun, for this reason; its turn is not
                        committed
    logprobs            one for each of `tokens`, or none
    prompt_logprobs     of the next prompt tokens, from the second on
    """

    request: RequestId
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    queued: float | None = None
    truncated: int = 0
    error: RequestError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


LOGPROBS = ("logprobs", "prompt_logprobs")
"""Fields of a `RowResult` that hold log probabilities."""


class Applied(NamedTuple):
    """The results of one applied step, at most one for each row.

    requests, tokens    `tokens[i]` is a new token of `requests[i]`. A row with drafts may have
                        several, one behind the other. The step says no more of these rows; nearly
                        all rows are such rows, so they are kept as two arrays
    rows                of all other rows
    """

    requests: Sequence[int] = ()
    tokens: Sequence[int] = ()
    rows: tuple[RowResult, ...] = ()

    def results(self) -> Iterator[RowResult]:
        """Yields all results. First tokens and ends come first, so that they are sent before other
        streams' tokens."""
        yield from reversed(self.rows)
        replies: dict[int, tuple[int, ...]] = {}
        for number, token in zip(self.requests, self.tokens, strict=True):
            replies[number] = (*replies[number], token) if number in replies else (token,)
        for number in reversed(replies):
            yield RowResult(RequestId(number), replies[number])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles rows by columns, and log probabilities as plain tuples: objects take pickle twice
        the time."""
        if not self.rows:
            return Applied, (self.requests, self.tokens)
        columns: dict[str, Any] = dict(
            zip(RowResult._fields, zip(*self.rows, strict=True), strict=True)
        )
        for name in LOGPROBS:
            columns[name] = [entries and [*map(tuple, entries)] for entries in columns[name]]
        return _read_applied, (self.requests, self.tokens, (*columns.values(),))


def _read_applied(
    requests: Sequence[int], tokens: Sequence[int], columns: Sequence[Sequence[Any]]
) -> Applied:
    fields = dict(zip(RowResult._fields, columns, strict=True))
    for name in LOGPROBS:
        fields[name] = [tuple(map(TokenLogprobs._make, plain)) for plain in fields[name]]
    return Applied(requests, tokens, tuple(map(RowResult, *fields.values())))


class ConversationKV(NamedTuple):
    """`chunks`: counts of one conversation's log by the tiers' labels, and "dropped". A chunk in
    several tiers counts in the fastest only."""

    conversation: str
    chunks: dict[str, int]


class Residency(NamedTuple):
    """A range of all conversations, in order of creation, from number `start` on. `following`: the
    number at which the next range starts, 0 after the last conversation."""

    chunk_tokens: int
    conversations: list[ConversationKV]
    following: int
    start: int = 0
