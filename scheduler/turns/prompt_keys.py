"""The keys of a prompt. They are made in pieces, because a prompt may have a million tokens, and
once for all choices of a call."""

from __future__ import annotations

from array import array

from ..kv.chunk_keys import ChunkKeys
from ..types import ChunkKey, Request
from ..work import COPIED, LARGEST_PIECE, Pieces
from .conversations import Conversation, equal_tokens

POINTER = 8  # bytes of a list's entry


class PromptKeys:
    """context_start  the context start, as known from the request's conversation
    keys          one for each full chunk from there on, as in `ChunkKeys`, as far as they are made
    key_chains    keys from other context starts, as far as they have been tried
    first_keys    the first chunk's key for each other context start that has been tried

    Turns of the same prompt share these until their replies begin.
    """

    def __init__(
        self, chunk_keys: ChunkKeys, chunk_tokens: int, request: Request, log: Conversation | None
    ):
        """`log`: the conversation whose KV the request may use."""
        self._chunk_keys = chunk_keys
        self._size = chunk_tokens
        self._prompt, self._salt = request.prompt, request.salt
        self._log_start = 0 if log is None else log.context_start
        self.context_start = 0
        self.keys: list[ChunkKey] = []
        self.key_chains: dict[int, list[ChunkKey]] = {}
        self.first_keys: dict[int, ChunkKey] = {}
        start = (array("i"), []) if log is None else (log.tokens, log.keys)
        self._work = self._make(*start)

    def serves(self, request: Request, log: Conversation | None) -> bool:
        """True if these are that request's keys too."""
        start = 0 if log is None else log.context_start
        return self._prompt is request.prompt and (self._salt, self._log_start) == (
            request.salt,
            start,
        )

    def go_on(self) -> int | None:
        """Does one piece of the work. Returns its units, or None if all keys are made."""
        return next(self._work, None)

    def _make(self, log: array[int], log_keys: list[ChunkKey]) -> Pieces:
        """The part that the conversation's log contains is not hashed again."""
        prompt, start, size = self._prompt, self._log_start, self._size
        common = yield from equal_tokens(log, prompt)
        if start == 0 or (common > start and self._chunk_keys.first_seen(len(prompt)) >= start):
            self.context_start = start
            self.keys = log_keys[: common // size]
            yield len(self.keys) * POINTER // COPIED
        chunks = len(prompt) // size
        for first in range(len(self.keys), chunks, LARGEST_PIECE):
            end = min(first + LARGEST_PIECE, chunks)
            self._chunk_keys.extend(self.keys, self.context_start, self._salt, prompt, end * size)
            yield end - first
