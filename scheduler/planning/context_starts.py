"""Where the context of a request that overflows may begin, and what of its KV there is
(docs/design/overflow.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..context_window import RECOMPUTE, ContextWindow
from ..kv.chunk import Chunk
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..kv.whereabouts import unread
from ..turns.turn import Turn
from ..types import ChunkKey


class ContextStarts:
    """`windows`: None, or the rules of context overflow."""

    def __init__(
        self,
        store: ChunkStore,
        chunk_tokens: int,
        reuse: bool,
        chunk_keys: ChunkKeys,
        windows: ContextWindow | None,
    ):
        self._store = store
        self._chunk_tokens = chunk_tokens
        self._reuse = reuse
        self._chunk_keys = chunk_keys
        self._windows = windows

    def of(self, turn: Turn) -> tuple[Iterator[int], int]:
        """Returns the starts from which the turn's context may have KV, in the order in which they
        are tried, and the one at which it begins if they have too little."""
        windows = self._windows
        last = len(turn.tokens) - 1
        others: Sequence[int] = ()
        if windows is None or last < windows.length:
            anew = 0
        elif turn.usage is not None and windows.mode != RECOMPUTE:
            anew = turn.context_start
        else:
            *others, anew = windows.context_starts(last, turn.context_start)
        return self._computed(turn, others), anew

    def _computed(self, turn: Turn, starts: Sequence[int]) -> Iterator[int]:
        """Yields the turn's context start, and those where any context began. This looks at one
        chunk of each, before keys are made for all chunks."""
        first_keys = turn.first_keys
        pending = self._store.pending
        had_kv = self._store.was_computed
        for start in starts:
            if start == turn.context_start:
                yield start
                continue
            if not self._reuse:
                continue
            key = first_keys.get(start)
            if key is None:
                key = first_keys[start] = self._chunk_keys.first(
                    start, turn.request.salt, turn.tokens
                )
            if key in pending or had_kv(key):
                yield start

    def keys(self, turn: Turn, context_start: int) -> list[ChunkKey]:
        """The keys of the turn's full chunks from that context start on."""
        if context_start == turn.context_start or not self._reuse:
            return turn.keys
        keys = turn.key_chains.setdefault(context_start, [])
        tokens = turn.tokens
        self._chunk_keys.extend(keys, context_start, turn.request.salt, tokens, len(tokens))
        return keys

    def has_any(self, turn: Turn, keys: list[ChunkKey], start: int) -> bool:
        """True if any chunk from position `start` on is available without computing it."""
        return any(
            self._there(turn, keys[index])
            for index in range(start // self._chunk_tokens, len(keys))
        )

    def reach(
        self,
        turn: Turn,
        context_start: int,
        keys: list[ChunkKey],
        tail: Chunk | None,
        tail_tokens: int,
    ) -> int:
        """As `ContextWindow.reach`, for the turn's last position. The tail, behind the keyed
        chunks, is valid for `tail_tokens` tokens."""
        size = self._chunk_tokens
        count = len(turn.tokens)

        def first_missing(position: int) -> int:
            for index in range(position // size, -(-count // size)):
                if not (index < len(keys) and self._there(turn, keys[index])):
                    ours = tail is not None and tail.end == (index + 1) * size
                    return index * size + (tail_tokens if ours else 0)
            return count

        assert self._windows is not None
        return self._windows.reach(count - 1, context_start, first_missing)

    def _there(self, turn: Turn, key: ChunkKey) -> bool:
        """True if this chunk of a context that overflows is available without computing it."""
        if key in self._store.pending:
            return True
        chunk = self._store.find(key)
        return chunk is not None and chunk.resident and (turn.promotes or not unread(chunk))
