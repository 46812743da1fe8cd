"""Chunk keys: from the tokens of a context to the names under which its KV is found."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from functools import cached_property

from ..context_window import ContextWindow
from ..types import ChunkKey

NO_KEY = ChunkKey(b"")
"""Stands for chunks before a context's start, which do not exist: no chunk has it."""


def root_key(seed: bytes, chunk_tokens: int, salt: bytes) -> ChunkKey:
    """Where a chain of keys starts: everything but the tokens that changes KV, and the salt."""
    parts = (seed, chunk_tokens.to_bytes(4, "little"), salt)
    return ChunkKey(hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest())


def chunk_key(previous: ChunkKey, tokens: array[int], start: int, end: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(previous + tokens[start:end].tobytes()).digest())


class ChunkKeys:
    """Makes the keys of a context, listed by the index of their chunks: NO_KEYs stand before the context's start.

    `windows`: None, or how contexts overflow. It enters a key chain at the first chunk that it makes different.
    """

    def __init__(self, seed: bytes, chunk_tokens: int, windows: ContextWindow | None):
        self._seed, self._size, self._windows = seed, chunk_tokens, windows

    def extend(self, keys: list[ChunkKey], context_start: int, salt: bytes, tokens: array[int], end: int) -> None:
        """Adds to the keys of a context (none yet, or some) those of its full chunks up to position `end`."""
        size, windows = self._size, self._windows
        begin = context_start // size
        keys += [NO_KEY] * (begin - len(keys))
        moved = -1 if windows is None else windows.end(context_start) // size  # the first chunk that sees less
        for index in range(len(keys), end // size):
            previous = keys[-1] if index > begin else self._root(salt, context_start)
            if index == moved:
                previous = self._marked(previous)
            keys.append(chunk_key(previous, tokens, index * size, (index + 1) * size))

    def first(self, context_start: int, salt: bytes, tokens: array[int]) -> ChunkKey:
        """The key of the first chunk of a context that begins at `context_start`, which `tokens` reach beyond."""
        return chunk_key(self._root(salt, context_start), tokens, context_start, context_start + self._size)

    def all(self, tokens: array[int], salt: bytes, shared: int = 0) -> Iterator[ChunkKey]:
        """The keys of a log's full chunks, wherever its contexts may have begun, but for those within its first
        `shared` tokens. Their number grows with the square of the log's length: they are made one by one."""
        size = self._size
        for context_start in range(0, self.first_seen(len(tokens)) + 1, self._windows.step if self._windows else 1):
            keys: list[ChunkKey] = []
            done = max(context_start, shared) // size
            for end in range(context_start + size, len(tokens) // size * size + 1, size):
                self.extend(keys, context_start, salt, tokens, end)
                if end > done * size:
                    yield keys[-1]

    def first_seen(self, count: int, context_start: int = 0) -> int:
        """The first position that the last of `count` tokens sees."""
        return 0 if self._windows is None else self._windows.start(count - 1, context_start)

    def _root(self, salt: bytes, context_start: int) -> ChunkKey:
        root = root_key(self._seed, self._size, salt)
        return self._marked(root, context_start.to_bytes(8, "little")) if context_start else root

    def _marked(self, key: ChunkKey, with_it: bytes = b"") -> ChunkKey:
        return ChunkKey(hashlib.sha256(key + self._digest + with_it).digest())

    @cached_property
    def _digest(self) -> bytes:
        assert self._windows is not None  # without it every context starts at 0
        return self._windows.digest
