"""Chunk keys: names for KV, computed from the tokens of a context."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from functools import cached_property, lru_cache

from ..context_window import ContextWindow
from ..types import ChunkKey, Tokens

NO_KEY = ChunkKey(b"")
"""Stands for chunks before a context's start, which do not exist, and for keys that do not count.
No chunk has this key."""


@lru_cache(maxsize=256)
def root_key(seed: bytes, chunk_tokens: int, salt: bytes) -> ChunkKey:
    """The key before the first chunk: a digest of the salt and of everything except the tokens that
    changes KV."""
    parts = (seed, chunk_tokens.to_bytes(4, "little"), salt)
    return ChunkKey(
        hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    )


def chunk_key(previous: ChunkKey, tokens: Tokens, start: int, end: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(previous + tokens[start:end].tobytes()).digest())


class ChunkKeys:
    """Makes the keys of a context, listed by the index of their chunks. Before the context's start
    the list holds NO_KEY.

    `windows`: None, or the rules of context overflow. They enter a key chain at the first chunk
    whose KV they change.
    """

    def __init__(self, seed: bytes, chunk_tokens: int, windows: ContextWindow | None):
        self._seed = seed
        self._size = chunk_tokens
        self._windows = windows

    def extend(
        self, keys: list[ChunkKey], context_start: int, salt: bytes, tokens: Tokens, end: int
    ) -> None:
        """Extends `keys`, the keys of a context (perhaps empty), to its full chunks up to position
        `end`."""
        size, windows = self._size, self._windows
        begin = context_start // size
        keys += [NO_KEY] * (begin - len(keys))
        # the first chunk that does not see its whole context
        first_moved = -1 if windows is None else windows.end(context_start) // size
        for index in range(len(keys), end // size):
            previous = keys[-1] if index > begin else self._root(salt, context_start)
            if index == first_moved:
                previous = self._with_windows(previous)
            keys.append(chunk_key(previous, tokens, index * size, (index + 1) * size))

    def first(self, context_start: int, salt: bytes, tokens: Tokens) -> ChunkKey:
        """The key of the first chunk of a context that begins at `context_start`; `tokens` fill at
        least that chunk."""
        return chunk_key(
            self._root(salt, context_start), tokens, context_start, context_start + self._size
        )

    def all(self, tokens: array[int], salt: bytes, shared: int = 0) -> Iterator[ChunkKey]:
        """Makes the keys of a log's full chunks for every possible context start, one by one: their
        number grows with the square of the log's length. Yields NO_KEY for those in its first
        `shared` tokens."""
        size = self._size
        for context_start in range(
            0, self.first_seen(len(tokens)) + 1, self._windows.step if self._windows else 1
        ):
            keys: list[ChunkKey] = []
            done = max(context_start, shared) // size
            for end in range(context_start + size, len(tokens) // size * size + 1, size):
                self.extend(keys, context_start, salt, tokens, end)
                yield keys[-1] if end > done * size else NO_KEY

    def first_seen(self, count: int, context_start: int = 0) -> int:
        """The first position that the last of `count` tokens sees."""
        return 0 if self._windows is None else self._windows.start(count - 1, context_start)

    def _root(self, salt: bytes, context_start: int) -> ChunkKey:
        root = root_key(self._seed, self._size, salt)
        return (
            self._with_windows(root, context_start.to_bytes(8, "little")) if context_start else root
        )

    def _with_windows(self, key: ChunkKey, start: bytes = b"") -> ChunkKey:
        """A key that depends on the rules of context overflow too."""
        return ChunkKey(hashlib.sha256(key + self._digest + start).digest())

    @cached_property
    def _digest(self) -> bytes:
        assert self._windows is not None  # without it every context starts at 0
        return self._windows.digest
