"""The needs of one request: the tiers of its chunks, the chunks to swap in or compute, and the
number of GPU slots.

A lookup changes no state. If the request fits, it later gets all its slots at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

from ..context_window import ContextWindow
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk, State
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.whereabouts import being_read, only_below, shared_only, unread
from ..plan import Span
from ..turns.conversations import Conversation
from ..turns.row_state import Cut
from ..turns.turn import Turn
from ..types import GPU, HOST, LABELS, TIERS, ChunkKey, Tier, Usage
from .context_starts import ContextStarts
from .state_lookup import NeedsReads, StateLookup, StateNeeds, overlaps

LEAST_WORK_S = 1e-6  # used if the profile says that computing costs nothing


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """context_start, keys
                  the context's start, and its keys from there on
    first         index of the chunk at which the row begins
    chunks        from there to the end of the row's window: a resident chunk, or None for one to be
                  computed into a new slot (later chunks get their slots later)
    spans         the tokens to compute, ascending; the last one ends with the prompt and samples
    swap_ins      those of `chunks` that are on HOST only
    tail          the tail among `chunks`, valid for `tail_tokens` tokens
    idle_spare, idle_only
                  hits on the GPU that no row holds, with and without a copy: once pinned, their
                  slots are not obtainable
    new_slots     GPU slots for the chunks that are swapped in or computed
    usage         sources of the prompt's tokens that its last position sees
    state_swap_ins
                  states on HOST from which `spans` begin, ascending
    cuts          where a state is kept, within `spans`, ascending
    """

    context_start: int
    keys: list[ChunkKey]
    first: int
    chunks: list[Chunk | None]
    spans: deque[Span]
    swap_ins: deque[Chunk]
    tail: Chunk | None
    tail_tokens: int
    idle_spare: int
    idle_only: int
    new_slots: int
    usage: Usage
    state_swap_ins: list[State]
    cuts: list[Cut]

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return sum(span.end - span.start for span in self.spans)


@dataclass(slots=True)
class _View:
    """A turn as seen from one context start. Its last position sees the positions from `seen` on;
    the row begins at chunk `first` and has slots for `held` chunks."""

    turn: Turn
    conversation: Conversation | None
    context_start: int
    keys: list[ChunkKey]
    tail: Chunk | None
    tail_tokens: int
    seen: int = 0
    first: int = 0
    held: int = 0


class CacheLookup:
    """Finds the chunks of a request. `windows`: None, or the rules of context overflow.
    `states`: None if the model has no recurrent states."""

    def __init__(
        self,
        store: ChunkStore,
        cost: CostProfile,
        chunk_tokens: int,
        reuse: bool,
        chunk_keys: ChunkKeys,
        windows: ContextWindow | None,
        states: StateLookup | None = None,
    ):
        self.states = states
        self._store = store
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._reuse = reuse
        self._chunk_keys = chunk_keys
        self._windows = windows
        self._starts = ContextStarts(store, chunk_tokens, reuse, chunk_keys, windows)

    def must_wait(self, key: ChunkKey) -> bool:
        """True while a row computes that chunk or swaps it in, while it is promoted, and
        until its only copy, on HOST, is confirmed. Waiting for it is better than computing it
        twice."""
        if key in self._store.pending:
            return True
        chunk = self._store.find(key)
        return chunk is not None and self._coming(chunk)

    def _coming(self, chunk: Chunk) -> bool:
        return chunk.awaits_swap_in or being_read(chunk) or self._store.unconfirmed(chunk)

    def seen_keys(self, turn: Turn) -> list[ChunkKey]:
        """Returns the keys of the chunks that the turn's last position sees, as far as its context
        start is known."""
        first = (
            self._chunk_keys.first_seen(len(turn.tokens), turn.context_start) // self._chunk_tokens
        )
        # not copied: a step may ask for thousands of turns
        return turn.keys[first:] if first else turn.keys

    def work(self, turn: Turn, there: int) -> float:
        """Predicted seconds, above 0, that the turn's missing tokens add to a step. A token is
        missing if the turn's last position sees it and no tier has its KV. `there` of the seen
        chunks are in some tier. The step's fixed part does not count: rows that generate need it
        anyway."""
        tokens = (
            len(turn.tokens)
            - (len(turn.keys) - len(self.seen_keys(turn)) + there) * self._chunk_tokens
        )
        return self._step_growth(tokens, len(turn.tokens))

    def work_now(self, turn: Turn, needs: RequestNeeds) -> float:
        """Predicts like `work`, for the tokens that the turn computes if it joins with these
        needs."""
        return self._step_growth(needs.computed, len(turn.tokens))

    def _step_growth(self, tokens: int, context: int) -> float:
        cost = self._cost
        return max(
            LEAST_WORK_S, cost.step(max(1, tokens), context=context) - cost.step_base_seconds
        )

    def readable(self, chunk: Chunk) -> bool:
        """True if the chunk is only in lower tiers, not being read yet, and costs more to compute
        than to swap in from HOST. A state's piece saves the computing of many chunks."""
        return unread(chunk) and (
            chunk.state is not None or self._cost.recompute(chunk.end) >= self._cost.swap_in()
        )

    def lower_sources(self, turn: Turn) -> dict[ChunkKey, Tier]:
        """Returns the tiers of the turn's chunks that are only in lower tiers, those being read
        included."""
        chunks = (self._store.find(key) for key in self.seen_keys(turn))
        return {
            chunk.key: next(tier for tier in TIERS if chunk.slots[tier] != NO_SLOT)
            for chunk in chunks
            if chunk and chunk.key and only_below(chunk)
        }

    def _worth_reading(self, chunks: list[Chunk], rows: int) -> bool:
        """Reading delays one request, and queues behind other reads; recomputing delays the whole
        batch. The chunks are all of this server's tiers, or all of the shared one: its chunks are
        swapped in while others are read."""
        cost = self._cost
        count = len(chunks)
        shared = self._store.shared
        if shared is not None and shared_only(chunks[0]):
            reading = (shared.reading + count) * max(shared.read_s, cost.swap_in())
        else:
            waiting = self._store.lower.local.reading + count
            reading = waiting * cost.read() + count * cost.swap_in()
        return (1 + rows) * sum(cost.recompute(chunk.end) for chunk in chunks) >= reading

    def _worthwhile(self, chunks: list[Chunk], rows: int) -> list[Chunk]:
        """Those of the chunks that are read faster than computed: each tier's all, or none."""
        local = [chunk for chunk in chunks if not shared_only(chunk)]
        shared = [chunk for chunk in chunks if shared_only(chunk)]
        return [
            chunk
            for part in (local, shared)
            if part and self._worth_reading(part, rows)
            for chunk in part
        ]

    def look_up(
        self, turn: Turn, conversation: Conversation | None, rows: int
    ) -> RequestNeeds | NeedsReads | ChunkKey:
        """Returns the turn's needs in a batch with `rows` other rows, or the chunks to read from
        lower tiers first, or the key of the last chunk to wait for (so it is not looked up again
        for each).

        A context that overflows keeps the first start from which fewer tokens must be computed than
        its last position sees; else it begins a new context. After the turn's first seat its start
        is fixed, because the reply depends on it.
        """
        starts, anew = self._starts.of(turn)
        most = len(turn.tokens) - 1 - anew
        for context_start in starts:
            request_needs = self._needs_from(turn, conversation, rows, context_start, most)
            if request_needs is not None and not (
                isinstance(request_needs, RequestNeeds) and request_needs.computed > most
            ):
                return request_needs
        needs = self._needs_from(turn, conversation, rows, anew)
        assert needs is not None
        return needs

    def _needs_from(
        self,
        turn: Turn,
        conversation: Conversation | None,
        rows: int,
        context_start: int,
        most: float = inf,
    ) -> RequestNeeds | NeedsReads | ChunkKey | None:
        """None if surely more than `most` tokens must be computed: a prompt of a million tokens is
        not read to its end to count them."""
        size = self._chunk_tokens
        count = len(turn.tokens)
        windows = self._windows
        keys = self._starts.keys(turn, context_start)
        view = _View(
            turn,
            conversation,
            context_start,
            keys,
            *self._usable_tail(turn, conversation, context_start),
        )
        end = count
        overflows = False
        if windows is not None and count > windows.length:
            view.seen = windows.start(count - 1, context_start)
            if most < inf and view.tail is None and not self._starts.has_any(turn, keys, view.seen):
                return None
            start = self._starts.reach(turn, context_start, keys, view.tail, view.tail_tokens)
            end = min(count, windows.end(start))
            overflows = True
            view.first = start // size
        view.held = -(-end // size) - view.first

        hits: list[Chunk | None] = []
        computed_before: list[bool] = []  # False for a hit
        to_read: list[Chunk] = []
        unknown = 0
        # With states, later tokens are computed again if KV before them is missing.
        at_any_cost = overflows or self.states is not None
        find = self._store.find
        swap_in = self._cost.swap_in()
        reads = unread if overflows else self.readable
        seen = keys[view.first : view.first + view.held] if self._reuse else []
        for key in seen:
            chunk = find(key)
            if chunk is not None and chunk.slots[GPU] >= 0 and not chunk.awaits_swap_in:
                hits.append(chunk)
                computed_before.append(False)
                continue
            if key in self._store.pending or (chunk is not None and self._coming(chunk)):
                return next(last for last in reversed(seen) if self.must_wait(last))
            # Older positions cannot be recomputed alone, so the rest of their KV is read and
            # swapped in at any cost.
            if chunk is not None and chunk.slots[HOST] < 0 and turn.promotes and reads(chunk):
                to_read.append(chunk)
            hit = (
                chunk is not None
                and chunk.slots[HOST] >= 0
                and (at_any_cost or self._cost.recompute(chunk.end) >= swap_in)
            )
            hits.append(chunk if hit else None)
            computed_before.append(not hit and self._store.was_computed(key))
            unknown += chunk is None
            # of one chunk a tail may have a part, and of another there may be no more
            if (unknown - 2) * size > most:
                return None
        if self.states is None:
            if to_read and not overflows:
                to_read = self._worthwhile(to_read, rows)
            if to_read:
                return NeedsReads(to_read, hits)
        missing = -(-count // size) - view.first - len(hits)
        hits += [None] * missing
        computed_before += [False] * missing
        if view.tail is not None:
            index = view.tail.end // size - 1 - view.first
            if 0 <= index < view.held and hits[index] is None:
                hits[index] = view.tail
            else:
                view.tail = None
                view.tail_tokens = 0
        return self._needs(view, hits, computed_before, to_read, rows)

    def _usable_tail(
        self, turn: Turn, conversation: Conversation | None, context_start: int
    ) -> tuple[Chunk | None, int]:
        """Returns the private chunk that the turn may append to, and how many of its tokens belong
        to the turn."""
        if not self._reuse:
            return None, 0
        tail = turn.tail
        common = len(turn.tokens)
        begun = turn.context_start
        if tail is None and conversation is not None and conversation.tail is not None:
            tail = conversation.tail
            common = conversation.common(turn.tokens)
            begun = conversation.context_start
        if (
            tail is None
            or not tail.resident
            or self._store.unconfirmed(tail)
            or begun != context_start
        ):
            return None, 0
        tokens = min(tail.tokens, common - (tail.end - self._chunk_tokens))
        return (tail, tokens) if tokens > 0 else (None, 0)

    def _needs(
        self,
        view: _View,
        hits: list[Chunk | None],
        computed_before: list[bool],
        to_read: list[Chunk],
        rows: int,
    ) -> RequestNeeds | NeedsReads | ChunkKey:
        size = self._chunk_tokens
        count = len(view.turn.tokens)
        turn = view.turn
        tail = view.tail
        seen = view.seen
        spare = self._store.spare[GPU]
        only = self._store.only[GPU]
        spans: deque[Span] = deque()
        swap_ins: deque[Chunk] = deque()
        sources = dict.fromkeys((*LABELS, "recomputed"), 0)
        idle_spare = idle_only = 0
        kv_before = self._kv_before(view)
        first = reached = 0  # [first, reached): the span being built
        for index, chunk in enumerate(hits, view.first):
            valid = size
            if chunk is None or chunk is tail:
                valid = view.tail_tokens if chunk else 0
                start = index * size + valid
                end = min((index + 1) * size, count)
                if start < end:
                    if reached != start:
                        if first < reached:
                            spans.append(Span(-1, first, reached, first, 0))
                        first = start
                    reached = end
                    again = end if computed_before[index - view.first] else min(end, kv_before)
                    sources["recomputed"] += max(0, again - max(start, seen))
                if chunk is None:
                    continue
            sources[_source(turn, chunk)] += valid if index * size >= seen else 0
            if chunk.slots[GPU] < 0:
                swap_ins.append(chunk)
                continue
            if chunk.victim_set is spare:
                idle_spare += 1
            elif chunk.victim_set is only:
                idle_only += 1
        if first < reached:
            spans.append(Span(-1, first, reached, first, 0))
        if tail is not None and tail.slots[GPU] < 0:
            # last, so it is gated: a plan that swaps a tail in early might evict it
            swap_ins.remove(tail)
            swap_ins.append(tail)
        state_swap_ins: list[State] = []
        cuts: list[Cut] = []
        if self.states is None:
            self._end_with_a_sample(turn, spans, hits, tail, count, sources)
        else:
            needs = self.states.look_up(
                turn,
                view.conversation,
                view.context_start,
                view.keys,
                [(span.start, span.end) for span in spans],
                hits,
                to_read,
                rows,
            )
            if not isinstance(needs, StateNeeds):
                return needs
            spans, state_swap_ins, cuts = needs
            present = [
                (at, chunk) for at, chunk in enumerate(hits, view.first) if chunk is not None
            ]
            ranges = (
                (at * size, at * size + (view.tail_tokens if chunk is tail else size))
                for at, chunk in present
            )
            for (_, chunk), again in zip(present, overlaps([*spans], ranges), strict=True):
                sources[_source(turn, chunk)] -= again
                sources["recomputed"] += again
        if turn.unscored:
            spans = _scoring(spans, turn.scored)
            sources = {"recomputed": sum(sources.values())}
        usage = Usage(**sources, new=count - seen - sum(sources.values()))
        chunks = hits[: view.held]
        return RequestNeeds(
            context_start=view.context_start,
            keys=view.keys,
            first=view.first,
            chunks=chunks,
            spans=spans,
            swap_ins=swap_ins,
            tail=tail,
            tail_tokens=view.tail_tokens,
            idle_spare=idle_spare,
            idle_only=idle_only,
            new_slots=chunks.count(None) + len(swap_ins),
            usage=usage,
            state_swap_ins=state_swap_ins,
            cuts=cuts,
        )

    def _end_with_a_sample(
        self,
        turn: Turn,
        spans: deque[Span],
        hits: list[Chunk | None],
        tail: Chunk | None,
        count: int,
        sources: dict[str, int],
    ) -> None:
        """Makes the last token part of a span, because it is always computed; in a keyed chunk it
        is not written."""
        if spans and spans[-1].end == count:
            spans[-1] = spans[-1]._replace(samples=1)
            return
        last = hits[-1]
        assert last is not None
        spans.append(Span(-1, count - 1, count, count - 1 if last is tail else count, 1))
        sources[_source(turn, last)] -= 1
        sources["recomputed"] += 1

    def _kv_before(self, view: _View) -> int:
        """Returns how many leading tokens have had KV in the turn's conversation or before a
        restart, in any context."""
        conversation, turn = view.conversation, view.turn
        if not self._reuse:
            return 0
        if conversation is None:
            return turn.request.stored_tokens
        kv_before = min(conversation.common(turn.tokens), len(conversation.tokens) - 1)
        return max(turn.request.stored_tokens, kv_before)


def _source(turn: Turn, chunk: Chunk) -> str:
    """The tier that counts as the chunk's source: a lower one if it was only there at the turn's
    first lookup, else its tier now."""
    if turn.lower_sources and chunk.key in turn.lower_sources:
        return LABELS[turn.lower_sources[chunk.key]]
    return LABELS[GPU if chunk.slots[GPU] >= 0 else HOST]


def _scoring(spans: deque[Span], position: int) -> deque[Span]:
    """Adds every position from `position` on that `spans` leaves out: it is computed for its logits
    and not written.

    KV exists     |########|        |####|
    spans                  |--------|    |---|
    scoring       |~~~~~~~~|--------|~~~~|---|    ~ not written
    """
    scoring: deque[Span] = deque()
    for span in spans:
        if span.start < position:
            before = span._replace(end=min(span.end, position))
            scoring.append(before if before.end == span.end else before._replace(samples=0))
        if span.end > position:
            write_from = max(span.write_from, position)
            scoring.append(span._replace(start=position, write_from=write_from, scores=True))
            position = span.end
    return scoring
