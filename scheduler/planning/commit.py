"""Commits computed work: gives keys to full chunks and logs to conversations whose turns have
ended."""

from __future__ import annotations

from math import inf

from ..config import SchedulerConfig
from ..kv.chunk import Chunk
from ..kv.chunk_keys import ChunkKeys
from ..kv.chunk_store import ChunkStore
from ..turns.conversations import Conversations, Log
from ..turns.turn import RunningTurn, Turn
from .prefetch import Prefetcher


class Committer:
    """Files the results of steps: keys for chunks, logs for conversations."""

    def __init__(
        self,
        config: SchedulerConfig,
        chunk_keys: ChunkKeys,
        store: ChunkStore,
        conversations: Conversations,
        prefetcher: Prefetcher,
    ):
        self._size, self._reuse = config.chunk_tokens, config.reuse
        self._chunk_keys = chunk_keys
        self._store = store
        self._conversations = conversations
        self._prefetcher = prefetcher

    def on_computed(self, row: RunningTurn, start: int, end: int) -> None:
        """The KV of [start, end) is written: chunks that are full now get their keys."""
        size = self._size
        for index in range(start // size, -(-end // size)):
            chunk = row.chunks[index - row.first]
            if chunk.key is not None:
                continue
            if end >= (index + 1) * size:
                chunk.tokens = size
                self.publish_full(row, index)
            else:
                chunk.tokens = max(chunk.tokens, end - index * size)

    def publish_full(self, row: RunningTurn, index: int) -> None:
        """Gives the row's full chunk of that index its key. For generated tokens the key is made
        here."""
        if not self._reuse:
            return
        turn = row.turn
        size = self._size
        if index == len(turn.keys):
            self._chunk_keys.extend(
                turn.keys, turn.context_start, turn.request.salt, turn.tokens, (index + 1) * size
            )
        key = turn.keys[index]
        place = index - row.first
        if row.chunks[place].key is None:
            chunk = row.chunks[place] = self._store.publish(row.chunks[place], key)
            # the owners of the row's chunks without a key may be gone, and their notes with them
            behind_twin = chunk.key is not None and place > 0 and row.chunks[place - 1].key is None
            self._store.note_context(turn, 0 if behind_twin else index, index + 1)
        if key in row.pending:
            del row.pending[key]
            del self._store.pending[key]

    def tail(self, row: RunningTurn, reply: int) -> Chunk | None:
        """Returns the partly filled last chunk of a log of the prompt and `reply` tokens, or None
        if the row has not computed it."""
        count = len(row.turn.request.prompt) + reply
        full, rest = divmod(self._computed(row, count), self._size)
        place = full - row.first
        if (
            row.turn.request.conversation is None
            or not self._reuse
            or not rest
            or not 0 <= place < len(row.chunks)
        ):
            return None
        tail = row.chunks[place]
        if tail.key is not None:
            return None
        # All of it is computed or launched, unless the row still computes its history.
        tail.tokens = min(tail.tokens, rest) if row.spans else rest
        return tail if tail.tokens else None

    def _computed(self, row: RunningTurn, count: int) -> int:
        """How many of the row's first `count` tokens have KV. The last one has it if a launched
        step computes it. That counts with states only: the row's state has seen the token too."""
        launched = row.state is not None and not row.spans and row.position >= count
        return count if launched else count - 1

    def publish_last(self, row: RunningTurn, reply: int) -> None:
        """With states: gives a key to a chunk that the last of the reply's first `reply` tokens
        fills."""
        count = len(row.turn.request.prompt) + reply
        place = count // self._size - 1 - row.first
        fills = count % self._size == 0 and self._computed(row, count) == count
        if fills and 0 <= place < len(row.chunks):
            self.publish_full(row, place + row.first)

    def commit(
        self, turn: Turn, row: RunningTurn | None, reply: int, tail: Chunk | None, now: float
    ) -> None:
        """The conversation's log becomes the prompt and the reply's tokens. The last token has no
        KV yet, unless the reply was cut."""
        if turn.request.conversation is None:
            return
        size = self._size
        count = len(turn.request.prompt) + reply
        keys = turn.keys[: (count if tail is None else count - 1) // size] if self._reuse else []
        first = self._chunk_keys.first_seen(count, turn.context_start) // size
        chunks = []
        for index, key in enumerate(keys[first:], first):
            place = -1 if row is None else index - row.first
            held = row.chunks[place] if row is not None and 0 <= place < len(row.chunks) else None
            chunk = held if held is not None and held.key == key else self._store.find(key)
            if chunk is None:
                break
            chunks.append(chunk)
            if first * size > turn.context_start:
                self._store.mark_past_window(chunk)
        state = None
        if turn.state is not None and turn.state.end <= count:
            state = turn.state
            turn.state = None  # it is the conversation's now
        log = Log(turn.tokens[:count], turn.context_start, keys, first, chunks, tail, state)
        self._conversations.commit(turn.request, log, now)
        hint = turn.request.expect_next_s
        self._prefetcher.expect(
            turn.request.conversation, len(chunks), inf if hint is None else now + hint
        )
