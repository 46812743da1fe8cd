"""Conversation logs: the tokens of each named dialogue, and its claims on the chunks that hold
their KV."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from math import inf
from typing import NamedTuple, TypeVar

from ..config import SchedulerConfig
from ..kv.chunk import NO_SLOT, Chunk, Claims, State
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.deletion import Deletions
from ..kv.states import KeptStates
from ..types import (
    LABELS,
    ChunkKey,
    ConversationKV,
    ErrorKind,
    Request,
    RequestError,
    Residency,
    Tokens,
)
from ..work import LOOKED_AT, MESSAGE, Backlog, Pieces, WorkBudget, all_at_once
from .quotas import Quotas
from .timers import Timers

Run = TypeVar("Run", "array[int]", str, "tuple[object, ...]")

PASSED = 64  # conversations that are passed over in one unit
COMPARED = 16_384  # tokens that are compared in one piece: larger copies are new pages each time
A_UNIT = 512  # tokens that are compared in one unit


class Log(NamedTuple):
    """A turn's result for its conversation; fields as in `Conversation`."""

    tokens: array[int]
    context_start: int
    keys: list[ChunkKey]
    first: int
    chunks: list[Chunk]
    tail: Chunk | None
    state: State | None = None


class Conversation:
    """owner  the owner whose quota it counts against
    salt      of the turn committed last: KV is shared within one salt only
    tokens    every token of the last committed branch; all but the last have had KV
    context_start
              start of the context in which they had KV (see `ContextWindow`)
    keys      one for each full chunk of KV, as in `ChunkKeys`
    first     index of the first chunk that the next turn's first position sees
    chunks    the chunks from there on, claimed; empty without reuse
    tail      the private chunk behind them, or None; it may have been dropped meanwhile
    state     the private state at the end of its last turn, or None
    active    time of its last activity, seconds
    ttl       seconds from the last activity to its expiry
    pinned    its chunks are evicted last, until `pinned_until`
    over_quota
              it is over its owner's quota
    unsettled work that changes its claims and is not done yet, a count

    Claims of many chunks change in pieces: those of the first `walked` chunks are `counted`, those
    of the others are still `before`.
    """

    __slots__ = (
        "active",
        "before",
        "chunks",
        "context_start",
        "counted",
        "first",
        "keys",
        "over_quota",
        "owner",
        "pinned",
        "pinned_until",
        "salt",
        "state",
        "tail",
        "tokens",
        "ttl",
        "unsettled",
        "walked",
    )

    def __init__(self, owner: str, salt: bytes, ttl: float, now: float):
        self.owner = owner
        self.salt = salt
        self.tokens: array[int] = array("i")
        self.context_start = self.first = 0
        self.keys: list[ChunkKey] = []
        self.chunks: list[Chunk] = []
        self.tail: Chunk | None = None
        self.state: State | None = None
        self.active = now
        self.ttl = ttl
        self.pinned = False
        self.pinned_until = -inf
        self.over_quota = False
        self.before = self.counted = Claims(0)
        self.walked = self.unsettled = 0

    def common(self, tokens: Tokens) -> int:
        """How many leading tokens are those of the log."""
        return common_prefix(self.tokens, tokens[: len(self.tokens)])

    @property
    def claims(self) -> Claims:
        """How it counts for each of its chunks."""
        return Claims(1, int(self.pinned), int(self.over_quota))


class Conversations:
    """All conversations, by id.

    expected    times at which the next turns' chunks should be on HOST, for conversations whose
                clients announced a turn
    """

    def __init__(
        self,
        config: SchedulerConfig,
        store: ChunkStore,
        chunk_keys: ChunkKeys,
        deletions: Deletions,
        claim_work: Backlog,
        budget: WorkBudget,
        states: KeptStates | None = None,
    ):
        self._store = store
        self._states = states
        self._chunk_keys = chunk_keys
        self._deletions = deletions
        self._claim_work = claim_work
        self._budget = budget
        self._chunk_tokens, self._ttl = config.chunk_tokens, config.conversation_ttl
        self._quotas = None if config.owner_kv_chunks is None else Quotas(config.owner_kv_chunks)
        self._most_logged = config.log_chunks
        self._logged = 0
        self._by_id: dict[str, Conversation] = {}
        # without a name; their claims are given up in pieces
        self._leaving: dict[Conversation, None] = {}
        self._by_activity: OrderedDict[str, None] = OrderedDict()  # ids, the longest idle first
        self.expected = Timers()
        # at or before the time at which a conversation expires or its pin ends
        self._due = Timers()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, conversation_id: str) -> bool:
        return conversation_id in self._by_id

    @property
    def mortal(self) -> bool:
        """True if a conversation or a pin may end by time alone."""
        return self.next_due < inf

    @property
    def next_due(self) -> float:
        """The next time at which a conversation or a pin may end, seconds."""
        return self._due.next

    def get(self, conversation_id: str) -> Conversation | None:
        return self._by_id.get(conversation_id)

    def of(self, request: Request) -> Conversation | None:
        """Returns the conversation whose KV the request may use, or None."""
        conversation = (
            self._by_id.get(request.conversation) if request.conversation is not None else None
        )
        return (
            conversation if conversation is not None and conversation.salt == request.salt else None
        )

    def tokens(self, conversation_id: str) -> array[int]:
        """Returns the log: every token of the last committed branch. Raises RequestError
        (NOT_FOUND) for an unknown id."""
        return self._get(conversation_id).tokens

    def _get(self, conversation_id: str) -> Conversation:
        conversation = self._by_id.get(conversation_id)
        if conversation is None:
            raise RequestError(
                ErrorKind.NOT_FOUND, f"there is no conversation {conversation_id!r}", "conversation"
            )
        return conversation

    def commit(self, request: Request, log: Log, now: float) -> None:
        """The turn is over: from now on its conversation's id names this branch.

        Where the branch named before differs, its chunks stay as unclaimed cache.
        """
        assert request.conversation is not None
        self._set(request.conversation, request.owner, request.salt, log, now)

    def _set(self, conversation_id: str, owner: str, salt: bytes, log: Log, now: float) -> None:
        conversation = self._by_id.get(conversation_id)
        if conversation is None:
            conversation = self._by_id[conversation_id] = Conversation(owner, salt, self._ttl, now)
        elif conversation.unsettled:
            conversation = self._by_id[conversation_id] = self._replaced(conversation)
        conversation.over_quota = False
        all_at_once(self._settle(conversation))
        shared = 0
        for before, after in zip(conversation.chunks, log.chunks, strict=False):
            if before is not after:
                break
            shared += 1
        for chunk in log.chunks[shared:]:
            self._count(chunk, Claims(0), conversation.claims)
        for chunk in conversation.chunks[shared:]:
            self._count(chunk, conversation.claims, Claims(0))
        conversation.before = conversation.counted = conversation.claims
        self._drop_tail(conversation)
        conversation.chunks = log.chunks
        self._take_log(conversation_id, conversation, salt, log, now)

    def _take_log(
        self, conversation_id: str, conversation: Conversation, salt: bytes, log: Log, now: float
    ) -> None:
        conversation.salt = salt
        self._be_active(conversation_id, now)
        self._logged += self._log_size(log.tokens) - self._log_size(conversation.tokens)
        conversation.tokens, conversation.context_start, conversation.keys, conversation.first = (
            log[:4]
        )
        conversation.tail = log.tail
        conversation.state = log.state
        self._pin_state(conversation)
        self._schedule(conversation_id, conversation)
        if self._quotas is not None:
            for other, over_quota in self._quotas.put(
                conversation.owner, conversation_id, len(log.chunks)
            ):
                self._mark(self._by_id[other], over_quota)

    def _replaced(self, conversation: Conversation) -> Conversation:
        """Work on its chunks is left, which needs them as they are: returns another conversation
        with the same log and times, and without chunks. The claims of this one are given up behind
        that work."""
        new = Conversation(
            conversation.owner, conversation.salt, conversation.ttl, conversation.active
        )
        new.tokens, new.pinned, new.pinned_until = (
            conversation.tokens,
            conversation.pinned,
            conversation.pinned_until,
        )
        self._drop_tail(conversation)
        self._leaving[conversation] = None
        self._claim_work.begin(self._leave(conversation))
        return new

    def touch(self, request: Request, now: float) -> None:
        """The user has written: the conversation is active."""
        if request.conversation is not None and request.conversation in self._by_id:
            self._be_active(request.conversation, now)

    def _be_active(self, conversation_id: str, now: float) -> None:
        self._by_id[conversation_id].active = now
        self._by_activity[conversation_id] = None
        self._by_activity.move_to_end(conversation_id)

    def _log_size(self, tokens: array[int]) -> int:
        """Chunks of the log, and one more: each conversation takes memory, however short its log
        is."""
        return len(tokens) // self._chunk_tokens + 1 if tokens else 0

    def fork(self, conversation_id: str, new_id: str, now: float) -> None:
        """Makes a second conversation with the same history. Full chunks are shared; the tail stays
        with the original.

        Raises RequestError: NOT_FOUND for an unknown id, CONFLICT if `new_id` exists.
        """
        source = self._get(conversation_id)
        if new_id in self._by_id:
            raise RequestError(
                ErrorKind.CONFLICT, f"there is a conversation {new_id!r} already", "conversation"
            )
        log = Log(
            source.tokens, source.context_start, source.keys, source.first, source.chunks, None
        )
        fork = self._by_id[new_id] = Conversation(source.owner, source.salt, self._ttl, now)
        fork.chunks = source.chunks
        self._take_log(new_id, fork, source.salt, log, now)
        self._change_claims(fork)

    def delete(
        self,
        conversation_id: str,
        shared: int = 0,
        others: array[int] | None = None,
        salt: bytes = b"",
    ) -> None:
        """Deletes the log and drops its chunks. A chunk stays if another conversation claims it, if
        a request uses it, or if it belongs to the first `shared` tokens. `others`: another log of
        the conversation, with this salt. If it differs, its chunks are dropped too, and `shared`
        counts for the log as far as both are equal.

        `LowerTierWork.take_erased` reports when its records are erased. Raises RequestError
        (NOT_FOUND) for an unknown id.
        """
        self._get(conversation_id)
        self._deletions.begin(self._delete(self._detach(conversation_id), shared, others, salt))

    def cut(
        self,
        conversation_id: str,
        kept: int,
        shared: int,
        others: array[int],
        salt: bytes,
        now: float,
    ) -> None:
        """As `delete`, but the conversation goes on with the first `kept` tokens of `others`, at
        most `shared` of them, as far as its own log begins with them. It keeps its TTL, its pin,
        the time of its next turn, and its claims on their full chunks; nothing is left to claim
        before `context_start`.
        """
        gone = self._get(conversation_id)
        kept = common_prefix(gone.tokens[:kept], others[:kept]) if salt == gone.salt else 0
        expected = self.expected.time(conversation_id)
        self._detach(conversation_id)
        if kept > gone.context_start:
            full = kept // self._chunk_tokens
            first = min(gone.first, full)
            chunks = gone.chunks[: full - first]
            log = Log(gone.tokens[:kept], gone.context_start, gone.keys[:full], first, chunks, None)
            rest = Conversation(gone.owner, gone.salt, gone.ttl, now)
            rest.pinned, rest.pinned_until = gone.pinned, gone.pinned_until
            rest.chunks = chunks
            self._by_id[conversation_id] = rest
            self._take_log(conversation_id, rest, gone.salt, log, now)
            self._change_claims(rest)
            self.expected.set(conversation_id, expected)
        self._deletions.begin(self._delete(gone, shared, others, salt))

    def _delete(
        self, gone: Conversation, shared: int, others: array[int] | None, salt: bytes
    ) -> Pieces:
        log = gone.tokens
        own = shared
        if others is not None:
            common = yield from equal_tokens(log, others)
            own = min(shared, common)
            if common == len(log) == len(others) and salt == gone.salt:
                others = None
        yield from self._end(gone, own)
        if self._chunk_keys.first_seen(len(log)) > 0:  # then it also has KV that it does not claim
            yield from self._deletions.drop(self._chunk_keys.all(log, gone.salt, own), units=2)
        if others is not None:
            yield from self._deletions.drop(self._chunk_keys.all(others, salt, shared), units=2)

    def _end(self, gone: Conversation, shared: int = 0) -> Pieces:
        """Gives up its claims, and drops the chunks that no other conversation claims, except those
        of the first `shared` tokens. Its claims ended at the first chunk that was gone at the last
        commit; its keys did not."""
        yield from self._leave(gone)
        yield from self._deletions.drop(islice(gone.keys, shared // self._chunk_tokens, None))

    def latest_chunks(self) -> Iterator[list[Chunk]]:
        """Yields the full chunks of each conversation, the latest active one first."""
        for name in reversed(self._by_activity):
            yield self._by_id[name].chunks

    def _detach(self, conversation_id: str) -> Conversation:
        """The id names no conversation any more. The caller gives up its claims. Its full chunks
        stay as cache."""
        conversation = self._by_id.pop(conversation_id)
        self._leaving[conversation] = None
        del self._by_activity[conversation_id]
        self._logged -= self._log_size(conversation.tokens)
        self._due.set(conversation_id, inf)
        self.expected.set(conversation_id, inf)
        self._drop_tail(conversation)
        if self._quotas is not None:
            for other, over_quota in self._quotas.remove(conversation.owner, conversation_id):
                self._mark(self._by_id[other], over_quota)
        return conversation

    def keep(
        self, conversation_id: str, ttl: float | None, pinned_until: float, now: float
    ) -> None:
        """Sets when the conversation's claims end: `ttl` seconds after its last activity (None:
        `conversation_ttl`). Until the time `pinned_until` its full chunks are evicted after all
        others, unless it is over its owner's quota.

        Raises RequestError (NOT_FOUND) for an unknown id.
        """
        conversation = self._get(conversation_id)
        conversation.ttl = self._ttl if ttl is None else ttl
        conversation.pinned_until = pinned_until
        self._pin(conversation, pinned_until > now)
        self._schedule(conversation_id, conversation)

    def expire(self, now: float, withheld: Iterable[Request], reserve: int = 0) -> None:
        """Ends pins and conversations whose time is over, and forgets the longest idle while logs
        are too large, until only `reserve` units are left in the budget of work. `overdue` says
        whether some are left.

        `withheld`: requests whose last output is kept back. Their conversations count as active: a
        client can continue one only after it gets that output.
        """
        for request in withheld:
            self.touch(request, now)
        while self._due.next <= now and self._budget.left > reserve:
            for conversation_id in self._due.take(now):
                self._end_what_is_over(conversation_id, now)
                break
        while self._too_many_logged and self._budget.left > reserve:
            self._budget.spend(MESSAGE)
            self._claim_work.begin(self._leave(self._detach(next(iter(self._by_activity)))))

    def overdue(self, now: float) -> bool:
        """True if `expire` has left work to a later step."""
        return self._due.next <= now or self._too_many_logged

    @property
    def _too_many_logged(self) -> bool:
        return self._logged > self._most_logged and len(self._by_id) > 1

    def end_if_over(self, conversation_id: str, now: float, withheld: Iterable[Request]) -> None:
        """Ends this one conversation if its time is over: a turn that arrives now must not revive
        it. See `expire`."""
        if self._due.time(conversation_id) <= now:
            for request in withheld:
                self.touch(request, now)
            self._due.set(conversation_id, inf)
            self._end_what_is_over(conversation_id, now)

    def _end_what_is_over(self, conversation_id: str, now: float) -> None:
        self._budget.spend(MESSAGE)
        conversation = self._by_id[conversation_id]
        if conversation.active + conversation.ttl <= now:
            self._deletions.begin_unanswered(self._end(self._detach(conversation_id)))
            return
        if conversation.pinned_until <= now:
            self._pin(conversation, False)
        self._schedule(conversation_id, conversation)

    def _schedule(self, conversation_id: str, conversation: Conversation) -> None:
        """Keeps one timer for each conversation, at or before its due time: later activity only
        moves that time back."""
        due = conversation.active + conversation.ttl
        if conversation.pinned:
            due = min(due, conversation.pinned_until)
        if due < self._due.time(conversation_id):
            self._due.set(conversation_id, due)

    def _pin(self, conversation: Conversation, pinned: bool) -> None:
        if conversation.pinned != pinned:
            conversation.pinned = pinned
            self._change_claims(conversation)
            self._pin_state(conversation)

    def _pin_state(self, conversation: Conversation) -> None:
        if conversation.state is not None:
            assert self._states is not None
            self._states.pin(conversation.state, conversation.pinned)

    def _mark(self, conversation: Conversation, over_quota: bool) -> None:
        if conversation.over_quota != over_quota:
            conversation.over_quota = over_quota
            self._change_claims(conversation)

    # -- claims

    def _change_claims(self, conversation: Conversation) -> None:
        conversation.unsettled += 1
        self._claim_work.begin(self._settled(conversation))

    def _settled(self, conversation: Conversation) -> Pieces:
        yield from self._settle(conversation)
        conversation.unsettled -= 1

    def _settle(self, conversation: Conversation) -> Pieces:
        """Makes its claims count as they are now; nothing if they do already."""
        return self._walk(conversation, conversation.claims)

    def _leave(self, conversation: Conversation) -> Pieces:
        """Gives up its claims."""
        yield from self._walk(conversation, Claims(0))
        del self._leaving[conversation]

    def _walk(self, conversation: Conversation, claims: Claims) -> Pieces:
        """Makes `claims` count for all of the conversation's chunks."""
        before = conversation.before
        if before == claims:
            return
        conversation.counted = claims
        units = sum(old != new for old, new in zip(before, claims, strict=True))
        for chunk in conversation.chunks:
            if not (before.claims or chunk.claims or self._store.has(chunk)):
                # It was dropped between the fork and this claim: the claims end here.
                conversation.chunks = conversation.chunks[: conversation.walked]
                break
            self._count(chunk, before, claims)
            conversation.walked += 1
            yield units
        conversation.before = claims
        conversation.walked = 0

    def _count(self, chunk: Chunk, before: Claims, after: Claims) -> None:
        """The conversation counted as `before` for the chunk; from now on it counts as `after`."""
        store = self._store
        if after.claims > before.claims:
            store.claim(chunk)
        if after.pins != before.pins:
            store.change_pins(chunk, after.pins - before.pins)
        if after.over_quota != before.over_quota:
            store.change_over_quota(chunk, after.over_quota - before.over_quota)
        if after.claims < before.claims:
            store.unclaim(chunk)

    def claims(self) -> dict[Chunk, Claims]:
        """Claims by chunk, counted anew (for `check`)."""
        counted: dict[Chunk, Claims] = {}
        for conversation in (*self._by_id.values(), *self._leaving):
            for place, chunk in enumerate(conversation.chunks):
                ours = conversation.counted if place < conversation.walked else conversation.before
                if ours.claims:
                    others = counted.get(chunk, Claims(0))
                    counted[chunk] = Claims(*map(sum, zip(ours, others, strict=True)))
        return counted

    def residency(self, start: int, most: int) -> Residency:
        """Returns the tiers of conversations' chunks, from conversation number `start` on. Cost:
        about `most` chunks."""
        entries: list[ConversationKV] = []
        self._budget.spend(start // PASSED)
        for conversation_id, conversation in islice(self._by_id.items(), start, None):
            if most <= 0:
                return Residency(self._chunk_tokens, entries, start + len(entries), start)
            entries.append(_whereabouts(conversation_id, conversation))
            chunks = len(conversation.keys) - conversation.first + 1
            self._budget.spend(1 + chunks // LOOKED_AT)
            most -= chunks
        return Residency(self._chunk_tokens, entries, 0, start)

    def _drop_tail(self, conversation: Conversation) -> None:
        if conversation.tail is not None and conversation.tail.resident:
            self._store.drop(conversation.tail)
        conversation.tail = None
        if conversation.state is not None:
            assert self._states is not None
            self._states.forget(conversation.state)
            conversation.state = None


def _whereabouts(conversation_id: str, conversation: Conversation) -> ConversationKV:
    counts = dict.fromkeys(LABELS, 0)
    tail = conversation.tail
    for chunk in conversation.chunks if tail is None else (*conversation.chunks, tail):
        for label, slot in zip(LABELS, chunk.slots, strict=True):
            if slot != NO_SLOT:
                counts[label] += 1
                break
    visible = len(conversation.keys) - conversation.first + (tail is not None)
    dropped = visible - sum(counts.values())
    return ConversationKV(conversation_id, counts | {"dropped": dropped})


def common_prefix(left: Run, right: Run) -> int:
    """Returns how many leading tokens, characters or messages are equal."""
    size = min(len(left), len(right))
    low = 0
    high = min(COMPARED, size)
    while left[low:high] == right[low:high]:
        if high == size:
            return size
        low = high
        high = min(high + COMPARED, size)
    # left[:low] == right[:low], left[:high] != right[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def equal_tokens(left: array[int], right: array[int]) -> Generator[int, None, int]:
    """Compares in pieces: returns how many leading tokens are equal."""
    size = min(len(left), len(right))
    for start in range(0, size, COMPARED):
        end = min(start + COMPARED, size)
        common = common_prefix(left[start:end], right[start:end])
        yield 1 + (end - start) // A_UNIT
        if start + common < end:
            return start + common
    return size
