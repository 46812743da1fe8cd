"""A context as the chunk store sees it: tokens, and the keys of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import ChunkKey, Request, Tokens


class KeyedContext(Protocol):
    """The fields of a turn that name its chunks.

    keys    of its full chunks, as in `ChunkKeys`
    """

    @property
    def request(self) -> Request: ...

    @property
    def keys(self) -> Sequence[ChunkKey]: ...

    @property
    def tokens(self) -> Tokens: ...
