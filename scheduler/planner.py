"""What one request needs: which of its chunks are where, what is loaded, what is computed, how much room it takes.

Looking counts only; nothing changes until the request is known to fit, then it gets all its room at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from .chunks import NO_SLOT, Chunk, ChunkStore
from .conversations import Conversation, common_prefix
from .cost import CostProfile
from .plan import Span
from .rows import Turn
from .types import ChunkKey, Usage


@dataclass(frozen=True, slots=True)
class Finding:
    """chunks        by index: a resident chunk, or None for one to be computed into a new slot
    spans         what is to be computed, ascending; the last one ends with the prompt and samples
    loads         those of `chunks` that are on HOST only
    tail          the one of `chunks` that is a tail, valid for `tail_tokens` tokens
    idle_safe, idle_only
                  hits on the GPU that nobody holds, with and without a copy: no longer obtainable once they are held
    new_slots     GPU slots for what is loaded and what is computed
    usage         where the prompt's tokens come from
    """

    chunks: list[Chunk | None]
    spans: deque[Span]
    loads: deque[Chunk]
    tail: Chunk | None
    tail_tokens: int
    idle_safe: int
    idle_only: int
    new_slots: int
    usage: Usage


class OnDisk(NamedTuple):
    """Chunks that the turn needs and that are quicker read from DISK than computed."""

    chunks: list[Chunk]


class Planner:
    def __init__(self, store: ChunkStore, cost: CostProfile, chunk_tokens: int, reuse: bool):
        self._store = store
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._reuse = reuse
        self.pending: dict[ChunkKey, int] = {}

    def must_wait(self, key: ChunkKey) -> bool:
        """A row is computing or loading that chunk, or it is being read: whoever needs it too had better wait for it
        (no herd)."""
        if key in self.pending:
            return True
        chunk = self._store.find(key)
        return chunk is not None and (chunk.loading or _being_read(chunk))

    def readable(self, chunk: Chunk) -> bool:
        """On DISK only, not being read yet, and dear enough to be."""
        on_disk = chunk.disk != NO_SLOT and chunk.gpu == NO_SLOT and chunk.host == NO_SLOT and chunk.moving is None
        cost = self._cost
        return on_disk and cost.recompute(chunk.end) >= cost.read() + cost.load()

    def keys_on_disk(self, turn: Turn) -> frozenset[ChunkKey]:
        """Of the chunks that are there only, those being read included."""
        chunks = (self._store.find(key) for key in turn.keys)
        return frozenset(
            chunk.key
            for chunk in chunks
            if chunk and chunk.key and chunk.disk != NO_SLOT and chunk.gpu == NO_SLOT and chunk.host == NO_SLOT
        )

    def _worth_reading(self, chunks: list[Chunk]) -> bool:
        """Behind whatever is being read already."""
        cost = self._cost
        seconds = (self._store.disk.reading + len(chunks)) * cost.read() + len(chunks) * cost.load()
        return sum(cost.recompute(chunk.end) for chunk in chunks) >= seconds

    def look_up(self, turn: Turn, conversation: Conversation | None) -> Finding | OnDisk | ChunkKey:
        """What the turn would need now; or what must be read before; or the key of the chunk that it had better wait
        for."""
        hits: list[Chunk | None] = []
        known: list[bool] = []
        on_disk: list[Chunk] = []
        find, load = self._store.find, self._cost.load()
        for key in turn.keys if self._reuse else ():
            chunk = find(key)
            if chunk is not None and chunk.gpu >= 0 and not chunk.loading:
                hits.append(chunk)
                known.append(False)
                continue
            if key in self.pending or (chunk is not None and (chunk.loading or _being_read(chunk))):
                return key
            if chunk is not None and chunk.disk >= 0 and turn.promotes and self.readable(chunk):
                on_disk.append(chunk)
            hit = chunk is not None and chunk.host >= 0 and self._cost.recompute(chunk.end) >= load
            hits.append(chunk if hit else None)
            known.append(not hit and self._store.known(key))
        if on_disk and self._worth_reading(on_disk):
            return OnDisk(on_disk)
        missing = -(-len(turn.tokens) // self._chunk_tokens) - len(hits)
        hits += [None] * missing
        known += [False] * missing
        tail, tail_tokens = self._usable_tail(turn, conversation, hits)
        if tail:
            hits[tail.end // self._chunk_tokens - 1] = tail
        return self._finding(turn, conversation, hits, known, tail, tail_tokens)

    def _usable_tail(
        self, turn: Turn, conversation: Conversation | None, hits: list[Chunk | None]
    ) -> tuple[Chunk | None, int]:
        """The private chunk the turn may append to, and how many of its tokens are the turn's."""
        if not self._reuse:
            return None, 0
        tail, common = turn.tail, len(turn.tokens)
        if tail is None and conversation is not None and conversation.tail is not None:
            tail, common = conversation.tail, common_prefix(conversation.tokens, turn.tokens)
        if tail is None or not tail.resident or tail.end > len(hits) * self._chunk_tokens:
            return None, 0
        tokens = min(tail.tokens, common - (tail.end - self._chunk_tokens))
        if tokens <= 0 or hits[tail.end // self._chunk_tokens - 1] is not None:
            return None, 0
        return tail, tokens

    def _finding(
        self,
        turn: Turn,
        conversation: Conversation | None,
        hits: list[Chunk | None],
        known: list[bool],
        tail: Chunk | None,
        tail_tokens: int,
    ) -> Finding:
        size, count = self._chunk_tokens, len(turn.tokens)
        reclaimable, uncopied = self._store.reclaimable, self._store.uncopied
        spans: deque[Span] = deque()
        loads: deque[Chunk] = deque()
        sources = {"gpu": 0, "host": 0, "disk": 0, "recomputed": 0}
        idle_safe = idle_only = 0
        first = reached = 0  # [first, reached): the span that grows
        for index, chunk in enumerate(hits):
            valid = size
            if chunk is None or chunk is tail:
                valid = tail_tokens if chunk else 0
                start, end = index * size + valid, min((index + 1) * size, count)
                if start < end:
                    if reached != start:
                        if first < reached:
                            spans.append(Span(-1, first, reached, first, False))
                        first = start
                    reached = end
                    sources["recomputed"] += (end - start) * known[index]
                if chunk is None:
                    continue
            sources[_source(turn, chunk)] += valid
            if chunk.gpu < 0:
                loads.append(chunk)
                continue
            if chunk.filed is reclaimable:
                idle_safe += 1
            elif chunk.filed is uncopied:
                idle_only += 1
        if first < reached:
            spans.append(Span(-1, first, reached, first, False))
        if tail is not None and tail.gpu < 0:
            loads.remove(tail)  # it comes last, so it is gated: the plan that loads a tail early might evict it
            loads.append(tail)
        self._end_with_a_sample(turn, spans, hits, tail, count, sources)
        sources["recomputed"] += self._dropped_tail_tokens(turn, conversation, hits, known)
        if turn.unscored:
            spans = _scoring(spans, turn.scored)
            sources = {"recomputed": sum(sources.values())}
        usage = Usage(**sources, new=count - sum(sources.values()))
        new_slots = hits.count(None) + len(loads)
        return Finding(hits, spans, loads, tail, tail_tokens, idle_safe, idle_only, new_slots, usage)

    def _end_with_a_sample(
        self,
        turn: Turn,
        spans: deque[Span],
        hits: list[Chunk | None],
        tail: Chunk | None,
        count: int,
        sources: dict[str, int],
    ) -> None:
        """The last token is computed in any case; in a keyed chunk it is not written."""
        if spans and spans[-1].end == count:
            spans[-1] = spans[-1]._replace(samples=True)
            return
        last = hits[-1]
        assert last is not None
        spans.append(Span(-1, count - 1, count, count - 1 if last is tail else count, True))
        sources[_source(turn, last)] -= 1
        sources["recomputed"] += 1

    def _dropped_tail_tokens(
        self, turn: Turn, conversation: Conversation | None, hits: list[Chunk | None], known: list[bool]
    ) -> int:
        """Tokens behind the log's last full chunk that had KV here and are computed again."""
        if conversation is None or not self._reuse:
            return 0
        start = len(conversation.keys) * self._chunk_tokens
        had_kv = min(common_prefix(conversation.tokens, turn.tokens), len(conversation.tokens) - 1)
        index = start // self._chunk_tokens
        if had_kv <= start or hits[index] is not None or known[index]:
            return 0
        return had_kv - start


def _being_read(chunk: Chunk) -> bool:
    return chunk.moving is not None and not chunk.moving.spills and chunk.gpu == NO_SLOT and chunk.host == NO_SLOT


def _source(turn: Turn, chunk: Chunk) -> str:
    """Where the chunk was when the turn was first looked at, as far as that was DISK; else where it is."""
    if turn.from_disk and chunk.key in turn.from_disk:
        return "disk"
    return "gpu" if chunk.gpu >= 0 else "host"


def _scoring(spans: deque[Span], position: int) -> deque[Span]:
    """Every position from `position` on is computed, for its logits; what `spans` leaves out is not written.

    KV exists     |########|        |####|
    spans                  |--------|    |---|
    scoring       |~~~~~~~~|--------|~~~~|---|    ~ not written
    """
    scoring: deque[Span] = deque()
    for span in spans:
        if span.start < position:
            before = span._replace(end=min(span.end, position))
            scoring.append(before if before.end == span.end else before._replace(samples=False))
        if span.end > position:
            write_from = max(span.write_from, position)
            scoring.append(span._replace(start=position, write_from=write_from, scores=True))
            position = span.end
    return scoring
