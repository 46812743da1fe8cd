"""How long a session has waited: seconds from arrival to first seat, summed over its earlier turns.

They are kept with the session's conversation, and end with it. A turn without a conversation
continues the turn whose last full chunk, with tokens of its reply, is the last in its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..kv.chunk_keys import NO_KEY
from ..types import ChunkKey
from .conversations import Conversations
from .turn import Turn

LONGEST = 120.0  # seconds that count: else an old session would pass all others for hours
MOST_KEYS = 10_000  # of turns without a conversation; the longest unused is left out first


class SessionWaits:
    def __init__(self, conversations: Conversations, chunk_tokens: int):
        self._conversations = conversations
        self._size = chunk_tokens
        self._by_key: OrderedDict[ChunkKey, float] = OrderedDict()

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._by_key)

    def behind(self, keys: Sequence[ChunkKey], otherwise: float) -> float:
        """Returns the seconds of the turn that ended with the last possible of these keys, or
        `otherwise` if none did."""
        return next((self._by_key[key] for key in reversed(keys) if key in self._by_key), otherwise)

    def turn_ended(self, turn: Turn) -> None:
        """Counts its wait for later turns of its session. A turn that never had a seat counts
        nothing."""
        if turn.queued is None:
            return
        conversation = self._conversations.of(turn.request)
        if conversation is not None:
            conversation.waited = min(LONGEST, conversation.waited + turn.queued)
            return
        # A chunk without generated tokens may be of many sessions: the end of a system prompt.
        has_reply = len(turn.keys) * self._size > len(turn.request.prompt)
        key = turn.keys[-1] if has_reply else NO_KEY
        if turn.request.conversation is None and key != NO_KEY:
            waited = self._by_key.pop(key, turn.waited) + turn.queued
            self._by_key[key] = min(LONGEST, waited)
            if len(self._by_key) > MOST_KEYS:
                self._by_key.popitem(last=False)
