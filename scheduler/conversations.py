"""Conversation logs: the tokens of every named dialogue, and its claims on the chunks that hold their KV."""

from __future__ import annotations

from array import array

from .chunks import Chunk, ChunkStore
from .types import ChunkKey, Request


class Conversation:
    """salt      of the turn committed last: KV is shared within one salt only
    tokens    every token of the last committed branch; all but the last have had KV
    keys      one for each full chunk of KV
    chunks    the chunks of those keys, claimed; empty without reuse
    tail      the private chunk behind them, or None; it may have been dropped meanwhile
    """

    __slots__ = ("chunks", "keys", "salt", "tail", "tokens")

    def __init__(self, salt: bytes):
        self.salt = salt
        self.tokens: array[int] = array("i")
        self.keys: list[ChunkKey] = []
        self.chunks: list[Chunk] = []
        self.tail: Chunk | None = None


class Conversations:
    def __init__(self, store: ChunkStore):
        self._store = store
        self._by_id: dict[str, Conversation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, conversation_id: str) -> Conversation | None:
        return self._by_id.get(conversation_id)

    def of(self, request: Request) -> Conversation | None:
        """The conversation whose KV the request may use."""
        conversation = self._by_id.get(request.conversation) if request.conversation is not None else None
        return conversation if conversation is not None and conversation.salt == request.salt else None

    def commit(
        self, request: Request, tokens: array[int], keys: list[ChunkKey], chunks: list[Chunk], tail: Chunk | None
    ) -> None:
        """The turn is over: its conversation's id names this branch from now on, whatever it named before.

        Chunks of the branch named before stay as unclaimed cache where the two differ.
        """
        assert request.conversation is not None
        self._set(request.conversation, request.salt, tokens, keys, chunks, tail)

    def _set(
        self,
        conversation_id: str,
        salt: bytes,
        tokens: array[int],
        keys: list[ChunkKey],
        chunks: list[Chunk],
        tail: Chunk | None,
    ) -> None:
        conversation = self._by_id.setdefault(conversation_id, Conversation(salt))
        shared = 0
        for before, after in zip(conversation.chunks, chunks, strict=False):
            if before is not after:
                break
            shared += 1
        for chunk in chunks[shared:]:
            self._store.claim(chunk)
        self._release(conversation, shared)
        conversation.salt, conversation.tokens, conversation.tail = salt, tokens, tail
        conversation.keys, conversation.chunks = keys, chunks

    def fork(self, conversation_id: str, new_id: str) -> None:
        """A second name for the same history. Full chunks are shared; the tail stays with the original."""
        source = self._by_id[conversation_id]
        self._set(new_id, source.salt, source.tokens[:], source.keys[:], source.chunks[:], None)

    def delete(self, conversation_id: str) -> None:
        """The log is gone and claims nothing any more; its tail is dropped."""
        self._release(self._by_id.pop(conversation_id))

    def claims(self) -> dict[Chunk, int]:
        """Claims by chunk, counted afresh (for `check`)."""
        counted: dict[Chunk, int] = {}
        for conversation in self._by_id.values():
            for chunk in conversation.chunks:
                counted[chunk] = counted.get(chunk, 0) + 1
        return counted

    def _release(self, conversation: Conversation, kept: int = 0) -> None:
        """Gives up the claims behind the first `kept` chunks, and the tail."""
        for chunk in conversation.chunks[kept:]:
            self._store.unclaim(chunk)
        if conversation.tail is not None and conversation.tail.resident:
            self._store.drop(conversation.tail)
        conversation.tail = None


def common_prefix(left: array[int], right: array[int]) -> int:
    """How many leading tokens are equal."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, high = 0, size  # left[:low] == right[:low], left[:high] != right[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
