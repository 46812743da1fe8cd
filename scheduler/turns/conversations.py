"""Conversation logs: the tokens of each named dialogue, and its claims on the chunks that hold their KV."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain, islice
from math import inf
from typing import NamedTuple, TypeVar

from ..config import SchedulerConfig
from ..kv.chunk import NO_SLOT, Chunk, Claims
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.deletion import Deletions
from ..types import ChunkKey, ConversationKV, Request, RequestError, Residency
from .quotas import Quotas
from .timers import Timers

Run = TypeVar("Run", "array[int]", str, "tuple[object, ...]")


class Log(NamedTuple):
    """A turn's result for its conversation; fields as in `Conversation`."""

    tokens: array[int]
    context_start: int
    keys: list[ChunkKey]
    first: int
    chunks: list[Chunk]
    tail: Chunk | None


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
    active    time of its last activity, seconds
    ttl       seconds from the last activity to its expiry
    pinned    its chunks are evicted last, until `pinned_until`
    over_quota
              it is over its owner's quota
    """

    __slots__ = (
        "active",
        "chunks",
        "context_start",
        "first",
        "keys",
        "over_quota",
        "owner",
        "pinned",
        "pinned_until",
        "salt",
        "tail",
        "tokens",
        "ttl",
    )

    def __init__(self, owner: str, salt: bytes, ttl: float, now: float):
        self.owner, self.salt = owner, salt
        self.tokens: array[int] = array("i")
        self.context_start = self.first = 0
        self.keys: list[ChunkKey] = []
        self.chunks: list[Chunk] = []
        self.tail: Chunk | None = None
        self.active, self.ttl = now, ttl
        self.pinned, self.pinned_until, self.over_quota = False, -inf, False


class Conversations:
    """All conversations, by id.

    expected    times at which the next turns' chunks should be on HOST, for conversations whose clients announced a
                turn
    """

    def __init__(self, config: SchedulerConfig, store: ChunkStore, chunk_keys: ChunkKeys, deletions: Deletions):
        self._store, self._chunk_keys, self._deletions = store, chunk_keys, deletions
        self._chunk_tokens, self._ttl = config.chunk_tokens, config.conversation_ttl
        self._quotas = None if config.owner_kv_chunks is None else Quotas(config.owner_kv_chunks)
        self._most_logged, self._logged = config.log_chunks, 0
        self._by_id: dict[str, Conversation] = {}
        self._by_activity: OrderedDict[str, None] = OrderedDict()  # ids, the longest idle first
        self.expected = Timers()
        self._due = Timers()  # at or before the time at which a conversation expires or its pin ends

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
        conversation = self._by_id.get(request.conversation) if request.conversation is not None else None
        return conversation if conversation is not None and conversation.salt == request.salt else None

    def tokens(self, conversation_id: str) -> array[int]:
        """Returns the log: every token of the last committed branch. Raises RequestError (404) for an unknown id."""
        return self._known(conversation_id).tokens

    def _known(self, conversation_id: str) -> Conversation:
        conversation = self._by_id.get(conversation_id)
        if conversation is None:
            raise RequestError(404, f"there is no conversation {conversation_id!r}", "conversation")
        return conversation

    def commit(self, request: Request, log: Log, now: float) -> None:
        """The turn is over: from now on its conversation's id names this branch.

        Where the branch named before differs, its chunks stay as unclaimed cache.
        """
        assert request.conversation is not None
        self._set(request.conversation, request.owner, request.salt, log, now)

    def _set(self, conversation_id: str, owner: str, salt: bytes, log: Log, now: float) -> None:
        conversation = self._by_id.setdefault(conversation_id, Conversation(owner, salt, self._ttl, now))
        self._mark(conversation, over_quota=False)
        shared = 0
        for before, after in zip(conversation.chunks, log.chunks, strict=False):
            if before is not after:
                break
            shared += 1
        for chunk in log.chunks[shared:]:
            self._store.claim(chunk)
            if conversation.pinned:
                self._store.change_pins(chunk, 1)
        self._release(conversation, shared)
        conversation.salt = salt
        self._be_active(conversation_id, now)
        self._logged += self._log_size(log.tokens) - self._log_size(conversation.tokens)
        conversation.tokens, conversation.context_start, conversation.keys, conversation.first = log[:4]
        conversation.chunks, conversation.tail = log.chunks, log.tail
        self._schedule(conversation_id, conversation)
        if self._quotas is not None:
            for other, over_quota in self._quotas.put(conversation.owner, conversation_id, len(log.chunks)):
                self._mark(self._by_id[other], over_quota)

    def touch(self, request: Request, now: float) -> None:
        """The user has written: the conversation is active."""
        if request.conversation is not None and request.conversation in self._by_id:
            self._be_active(request.conversation, now)

    def _be_active(self, conversation_id: str, now: float) -> None:
        self._by_id[conversation_id].active = now
        self._by_activity[conversation_id] = None
        self._by_activity.move_to_end(conversation_id)

    def _log_size(self, tokens: array[int]) -> int:
        """Chunks of the log, and one more: each conversation takes memory, however short its log is."""
        return len(tokens) // self._chunk_tokens + 1 if tokens else 0

    def fork(self, conversation_id: str, new_id: str, now: float) -> None:
        """Makes a second conversation with the same history. Full chunks are shared; the tail stays with the original.

        Raises RequestError: 404 for an unknown id, 409 if `new_id` exists.
        """
        source = self._known(conversation_id)
        if new_id in self._by_id:
            raise RequestError(409, f"there is a conversation {new_id!r} already", "conversation")
        log = Log(source.tokens[:], source.context_start, source.keys[:], source.first, source.chunks[:], None)
        self._set(new_id, source.owner, source.salt, log, now)

    def delete(self, conversation_id: str, shared: int = 0, others: Iterable[ChunkKey] = ()) -> None:
        """Deletes the log and drops its chunks, and the chunks of the keys in `others`. A chunk stays if another
        conversation claims it, if a request uses it, or if it belongs to the first `shared` tokens.

        `DiskWork.take_erased` reports when its records on DISK are erased. Raises RequestError (404) for an unknown id.
        """
        conversation, before = self._known(conversation_id), self._store.disk.deleted
        tokens, salt = conversation.tokens, conversation.salt
        self._remove(conversation_id, shared // self._chunk_tokens)
        outgrown = self._chunk_keys.first_seen(len(tokens)) > 0  # then it also has KV that it does not claim
        self._deletions.begin(chain(self._chunk_keys.all(tokens, salt, shared) if outgrown else (), others), before)

    def _remove(self, conversation_id: str, shared: int = 0) -> None:
        """Drops the log, its tail, and the chunks that no other conversation claims, except the first `shared`."""
        for key in self._forget(conversation_id)[shared:]:  # claims end at the first chunk gone at the last commit
            self._store.delete(key)

    def _forget(self, conversation_id: str) -> list[ChunkKey]:
        """Drops the log and its tail. Returns the keys of its other chunks, which stay as cache."""
        conversation = self._by_id.pop(conversation_id)
        del self._by_activity[conversation_id]
        self._logged -= self._log_size(conversation.tokens)
        self._due.set(conversation_id, inf)
        self.expected.set(conversation_id, inf)
        self._mark(conversation, over_quota=False)
        self._release(conversation)
        if self._quotas is not None:
            for other, over_quota in self._quotas.remove(conversation.owner, conversation_id):
                self._mark(self._by_id[other], over_quota)
        return conversation.keys

    def keep(self, conversation_id: str, ttl: float | None, pinned_until: float, now: float) -> None:
        """Sets when the conversation's claims end: `ttl` seconds after its last activity (None: `conversation_ttl`).
        Until the time `pinned_until` its full chunks are evicted after all others, unless it is over its owner's quota.

        Raises RequestError (404) for an unknown id.
        """
        conversation = self._known(conversation_id)
        conversation.ttl = self._ttl if ttl is None else ttl
        conversation.pinned_until = pinned_until
        self._pin(conversation, pinned_until > now)
        self._schedule(conversation_id, conversation)

    def expire(self, now: float, withheld: Iterable[Request]) -> None:
        """Ends pins and conversations whose time is over, and forgets the longest idle while logs are too large.

        `withheld`: requests whose last output is kept back. Their conversations count as active: a client can continue
        one only after it gets that output.
        """
        for request in withheld:
            self.touch(request, now)
        for conversation_id in self._due.take(now):
            conversation = self._by_id[conversation_id]
            if conversation.active + conversation.ttl <= now:
                self._remove(conversation_id)
                continue
            if conversation.pinned_until <= now:
                self._pin(conversation, False)
            self._schedule(conversation_id, conversation)
        while self._logged > self._most_logged and len(self._by_id) > 1:
            self._forget(next(iter(self._by_activity)))

    def _schedule(self, conversation_id: str, conversation: Conversation) -> None:
        """Keeps one timer for each conversation, at or before its due time: later activity only moves that time
        back."""
        due = conversation.active + conversation.ttl
        if conversation.pinned:
            due = min(due, conversation.pinned_until)
        if due < self._due.time(conversation_id):
            self._due.set(conversation_id, due)

    def _pin(self, conversation: Conversation, pinned: bool) -> None:
        if conversation.pinned != pinned:
            conversation.pinned = pinned
            for chunk in conversation.chunks:
                self._store.change_pins(chunk, 1 if pinned else -1)

    def _mark(self, conversation: Conversation, over_quota: bool) -> None:
        if conversation.over_quota != over_quota:
            conversation.over_quota = over_quota
            for chunk in conversation.chunks:
                self._store.change_over_quota(chunk, 1 if over_quota else -1)

    def claims(self) -> dict[Chunk, Claims]:
        """Claims by chunk, counted anew (for `check`)."""
        counted: dict[Chunk, Claims] = {}
        for conversation in self._by_id.values():
            for chunk in conversation.chunks:
                claims, pins, over_quota = counted.get(chunk, (0, 0, 0))
                counted[chunk] = Claims(claims + 1, pins + conversation.pinned, over_quota + conversation.over_quota)
        return counted

    def residency(self, start: int, most: int) -> Residency:
        """Returns the tiers of conversations' chunks, from conversation number `start` on. Cost: about `most`
        chunks."""
        found: list[ConversationKV] = []
        for conversation_id, conversation in islice(self._by_id.items(), start, None):
            if most <= 0:
                return Residency(self._chunk_tokens, found, start + len(found), start)
            found.append(_whereabouts(conversation_id, conversation))
            most -= len(conversation.keys) - conversation.first + 1
        return Residency(self._chunk_tokens, found, 0, start)

    def _release(self, conversation: Conversation, kept: int = 0) -> None:
        """Gives up the claims after the first `kept` chunks, and the tail."""
        for chunk in conversation.chunks[kept:]:
            if conversation.pinned:
                self._store.change_pins(chunk, -1)
            self._store.unclaim(chunk)
        if conversation.tail is not None and conversation.tail.resident:
            self._store.drop(conversation.tail)
        conversation.tail = None


def _whereabouts(conversation_id: str, conversation: Conversation) -> ConversationKV:
    gpu = host = disk = 0
    tail = conversation.tail
    for chunk in conversation.chunks if tail is None else (*conversation.chunks, tail):
        if chunk.gpu != NO_SLOT:
            gpu += 1
        elif chunk.host != NO_SLOT:
            host += 1
        elif chunk.disk != NO_SLOT:
            disk += 1
    visible = len(conversation.keys) - conversation.first + (tail is not None)
    return ConversationKV(conversation_id, gpu, host, visible - gpu - host - disk, disk)


COMPARED = 1 << 14  # at a time: larger copies are new pages each time


def common_prefix(left: Run, right: Run) -> int:
    """Returns how many leading tokens, characters or messages are equal."""
    size = min(len(left), len(right))
    low, high = 0, min(COMPARED, size)
    while left[low:high] == right[low:high]:
        if high == size:
            return size
        low, high = high, min(high + COMPARED, size)
    # left[:low] == right[:low], left[:high] != right[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
