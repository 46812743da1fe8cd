"""Reads chunks from lower tiers before their requests can join (CachedAttention, section 3.3.1)."""

from __future__ import annotations

from collections import deque
from itertools import chain
from math import inf

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.whereabouts import shared_only
from ..turns.conversations import Conversations
from .eviction import Evictor
from .lookup import CacheLookup
from .promotions import promote
from .queue_order import QueueOrder

READS_AHEAD_S = 0.1  # seconds of reading in progress at most; an urgent read may wait this long
LEAD_S = 1.0  # seconds by which an expected user may come early


class Prefetcher:
    """Prefetches for the requests in the queue, as many as HOST has room for (the paper's window
    C_mem / S_kv), and for conversations whose clients announced their next turn.

    A prefetch takes HOST slots only from chunks of lower value that are also in a lower tier, so it
    drops nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        store: ChunkStore,
        conversations: Conversations,
        lookup: CacheLookup,
        order: QueueOrder,
    ):
        self._store = store
        self._conversations = conversations
        self._lookup = lookup
        self._order = order
        self._cost = cost
        self._active = config.prefetch and bool(store.lower.local)
        self._most_reads = min(256, max(4, int(READS_AHEAD_S / cost.read())))
        self._expected: deque[Chunk] = deque()
        # HOST has no slot for the last prefetch, and no spill will free one soon
        self._no_room = False

    @property
    def busy(self) -> bool:
        """True if chunks are still to be read for expected conversations."""
        return bool(self._expected)

    @property
    def next_due(self) -> float:
        """The time at which the next conversation's chunks should be read, seconds."""
        return self._conversations.expected.next

    def expect(self, conversation_id: str, chunks: int, at: float = inf) -> None:
        """The conversation's next turn is expected at time `at` and will need `chunks` chunks;
        infinity: no longer expected."""
        if self._active:
            self._conversations.expected.set(
                conversation_id, at - LEAD_S - chunks * self._cost.read()
            )

    def plan(self, evictor: Evictor, now: float) -> None:
        """Does one step's share."""
        if not self._active:
            return
        for conversation_id in self._conversations.expected.take(now):
            conversation = self._conversations.get(conversation_id)
            assert conversation is not None
            self._expected.extend(conversation.chunks)
            for chunk in conversation.chunks:
                self._store.touch(chunk, now)
        if self._prefetch_queue(evictor, now):
            self._prefetch_expected(evictor)

    def _prefetch_queue(self, evictor: Evictor, now: float) -> bool:
        """Returns whether reading has begun for the turns that join first."""
        window = self._store.host.count
        for turn in self._order.preferred(now):
            keys = self._lookup.seen_keys(turn)
            window -= len(keys)
            if window < 0:
                break
            if turn.prefetched:
                continue
            states = self._lookup.states
            conversation = self._conversations.of(turn.request)
            pieces = () if states is None else states.likely(turn, conversation)
            chunks = chain(map(self._store.find, keys), pieces)
            if not all(self._prefetch(chunk, evictor) for chunk in chunks):
                return False
            turn.prefetched = True
        return True

    def _prefetch_expected(self, evictor: Evictor) -> None:
        """Drops prefetches that HOST cannot hold now or soon: they were only hints."""
        while self._expected and (self._prefetch(self._expected[0], evictor) or self._no_room):
            self._expected.popleft()

    def _prefetch(self, chunk: Chunk | None, evictor: Evictor) -> bool:
        """Returns False if the chunk must still be read and that cannot begin now. Chunks of the
        shared tier are read when their request could join, if that is worth it."""
        if chunk is None or not self._lookup.readable(chunk) or shared_only(chunk):
            return True
        self._no_room = False
        if self._store.lower.reading >= self._most_reads:
            return False
        begun = promote(evictor, chunk, drops=False)
        self._no_room = begun is False and not self._store.lower.writing
        return begun is True
