"""Requests that have arrived and are not in the queue yet: their keys are made and their chunks
looked for, in pieces, because a prompt may have a million tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..config import SchedulerConfig
from ..kv.chunk import Chunk
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..turns.conversations import Conversations
from ..turns.prompt_keys import PromptKeys
from ..turns.turn import Turn
from ..types import ChunkKey, Request
from ..work import LARGEST_PIECE, LOOKED_AT, Pieces, WorkBudget, all_at_once
from .lookup import CacheLookup
from .queue_order import QueueOrder
from .queues import RequestQueues
from .sharing import Sharing


class Preparation:
    """LARGEST_PIECE units for each prompt in turn, so a short one does not wait for a long one.
    Choices of one prompt come one after the other."""

    def __init__(
        self,
        config: SchedulerConfig,
        chunk_keys: ChunkKeys,
        store: ChunkStore,
        conversations: Conversations,
        lookup: CacheLookup,
        queues: RequestQueues,
        order: QueueOrder,
        budget: WorkBudget,
        sharing: Sharing | None = None,
    ):
        self._size = config.chunk_tokens
        self._reuse = config.reuse
        self._chunk_keys = chunk_keys
        self._store = store
        self._conversations = conversations
        self._lookup = lookup
        self._queues = queues
        self._order = order
        self._budget = budget
        self._sharing = sharing
        self._prompts: OrderedDict[PromptKeys, OrderedDict[Turn, Pieces]] = OrderedDict()
        self._turns: dict[Turn, PromptKeys] = {}
        # of the latest request: the next may be of the same prompt
        self._latest: PromptKeys | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._turns

    def begin(self, turn: Turn, now: float) -> None:
        """The turn has arrived now."""
        prompt = self._turns[turn] = self._keys(turn.request)
        self._prompts.setdefault(prompt, OrderedDict())[turn] = self._prepare(turn, prompt, now)

    def finish(self, turn: Turn) -> None:
        """Prepares the turn at once."""
        all_at_once(self._prompts[self._turns[turn]][turn])
        self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """The turn is in the queue, or has ended."""
        prompt = self._turns.pop(turn)
        del self._prompts[prompt][turn]
        if not self._prompts[prompt]:
            del self._prompts[prompt]

    def go_on(self, reserve: int = 0) -> None:
        """Goes on until only `reserve` units are left in the budget."""
        while self._prompts and self._budget.left > reserve:
            prompt, turns = next(iter(self._prompts.items()))
            self._prompts.move_to_end(prompt)
            self.prepare(next(iter(turns)), reserve)

    def prepare(self, turn: Turn, reserve: int = 0) -> None:
        """Works for this turn alone, until LARGEST_PIECE units are spent or only `reserve` are left
        in the budget."""
        work = self._prompts[self._turns[turn]][turn]
        reserve = max(reserve, self._budget.left - LARGEST_PIECE)
        while self._budget.left > reserve:
            units = next(work, None)
            if units is None:
                self.leave(turn)
                return
            self._budget.spend(units)

    def forget_latest(self) -> None:
        """A call's requests arrive together, so keys need not be kept for later ones."""
        if not self._turns:
            self._latest = None

    def _keys(self, request: Request) -> PromptKeys:
        log = self._conversations.of(request)
        if self._latest is None or not self._latest.serves(request, log):
            self._latest = PromptKeys(self._chunk_keys, self._size, request, log)
        return self._latest

    def _prepare(self, turn: Turn, prompt: PromptKeys, now: float) -> Pieces:
        """Makes the keys, predicts the turn's work and queues it. If requests wait or no seat is
        free, its chunks become the last victims: the user has just written.

        Otherwise the next plan takes the chunks into use, or makes them the last victims if the
        request does not fit.
        """
        if self._reuse:
            while (units := prompt.go_on()) is not None:
                yield units
            turn.take_keys(prompt)
        queues = self._queues
        find = self._store.find
        waits = bool(queues.waiting) or len(queues.free_seats) <= len(queues.swapping_in)
        stamp = self._store.stamp(now) if waits else now
        keys = self._lookup.seen_keys(turn)
        there = 0
        missing: list[tuple[ChunkKey, int]] = []
        for first in range(0, len(keys), LARGEST_PIECE):
            chunks = [find(key) for key in keys[first : first + LARGEST_PIECE]]
            there += sum(chunk is not None and chunk.resident for chunk in chunks)
            if self._sharing is not None:
                missing += self._missing(turn, keys, first, chunks)
            yield (
                1
                + len(chunks) // LOOKED_AT
                + (queues.await_chunks(turn, chunks, stamp) if waits else 0)
            )
        conversation = self._conversations.of(turn.request)
        if waits and conversation is not None and conversation.tail is not None:
            queues.await_chunks(turn, [conversation.tail], stamp)
        if waits and self._lookup.states is not None:
            yield queues.await_chunks(turn, self._lookup.states.likely(turn, conversation), stamp)
        yield 1 + len(queues.waiting) // LOOKED_AT
        self._order.arrived(turn, there)
        queues.enqueue(turn)
        if self._sharing is not None:
            states = self._lookup.states
            last_state = 0 if states is None else states.last_end(turn, conversation)
            self._sharing.look_for(turn, missing, last_state)

    def _missing(
        self, turn: Turn, keys: Sequence[ChunkKey], first: int, chunks: Iterable[Chunk | None]
    ) -> Iterator[tuple[ChunkKey, int]]:
        """Yields the key and the end of each of the chunks, those of `keys` from `first` on, that
        is in no tier here and that no row computes."""
        before = len(turn.keys) - len(keys)
        pending = self._store.pending
        for index, chunk in enumerate(chunks, first):
            if not (chunk is not None and chunk.resident) and keys[index] not in pending:
                end = turn.context_start + (before + index + 1) * self._size
                yield keys[index], end
