"""Chains of chunk keys: from the tokens of a context to the names under which its KV is found."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from functools import cached_property

from ..context_window import ContextWindow
from ..types import ChunkKey

NO_KEY = ChunkKey(b"")
"""Stands for chunks before a context's base, which do not exist: no chunk has it."""


def root_key(seed: bytes, chunk_tokens: int, salt: bytes) -> ChunkKey:
    """Where a chain of keys starts: everything but the tokens that changes KV, and the salt."""
    parts = (seed, chunk_tokens.to_bytes(4, "little"), salt)
    return ChunkKey(hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest())


def chunk_key(previous: ChunkKey, tokens: array[int], start: int, end: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(previous + tokens[start:end].tobytes()).digest())


class ChunkKeys:
    """A context's keys are listed by the index of their chunks: up to its base stand NO_KEYs.

    `windows`: None, or how contexts overflow. It enters a chain at the first chunk that it makes different.
    """

    def __init__(self, seed: bytes, chunk_tokens: int, windows: ContextWindow | None):
        self._seed, self._size, self._windows = seed, chunk_tokens, windows

    def extend(self, keys: list[ChunkKey], base: int, salt: bytes, tokens: array[int], end: int) -> None:
        """Adds to the keys of a context (none yet, or some) those of its full chunks up to position `end`."""
        size, windows = self._size, self._windows
        begin = base // size
        keys += [NO_KEY] * (begin - len(keys))
        moved = -1 if windows is None else windows.end(base) // size  # the first chunk that sees less than its base
        for index in range(len(keys), end // size):
            previous = keys[-1] if index > begin else self._root(salt, base)
            if index == moved:
                previous = self._marked(previous)
            keys.append(chunk_key(previous, tokens, index * size, (index + 1) * size))

    def first(self, base: int, salt: bytes, tokens: array[int]) -> ChunkKey:
        """The key of the first chunk of a context that begins at `base`, which `tokens` reach beyond."""
        return chunk_key(self._root(salt, base), tokens, base, base + self._size)

    def all(self, tokens: array[int], salt: bytes, shared: int = 0) -> Iterator[ChunkKey]:
        """The keys of a log's full chunks, wherever its contexts may have begun, but for those within its first
        `shared` tokens. Their number grows with the square of the log's length: they are made one by one."""
        size = self._size
        for base in range(0, self.first_seen(len(tokens)) + 1, self._windows.step if self._windows else 1):
            keys: list[ChunkKey] = []
            done = max(base, shared) // size
            for end in range(base + size, len(tokens) // size * size + 1, size):
                self.extend(keys, base, salt, tokens, end)
                if end > done * size:
                    yield keys[-1]

    def first_seen(self, count: int, base: int = 0) -> int:
        """The first position that the last of `count` tokens sees."""
        return 0 if self._windows is None else self._windows.start(count - 1, base)

    def _root(self, salt: bytes, base: int) -> ChunkKey:
        root = root_key(self._seed, self._size, salt)
        return self._marked(root, base.to_bytes(8, "little")) if base else root

    def _marked(self, key: ChunkKey, with_it: bytes = b"") -> ChunkKey:
        return ChunkKey(hashlib.sha256(key + self._digest + with_it).digest())

    @cached_property
    def _digest(self) -> bytes:
        assert self._windows is not None  # without it no context has a base, and none moves on
        return self._windows.digest
