"""The tiers of all conversations' chunks, as last reported by the loop. The loop is asked only
while the page is open."""

from __future__ import annotations

from collections.abc import Iterator

from ...scheduler.types import ConversationKV, Residency

LOOK_INTERVAL_S = 0.25


class ResidencyView:
    """The loop reports one range of conversations at a time, so that many conversations never cause
    a long pause.

    chunk_tokens    of every chunk; 0 before the first answer
    following       start of the next range to request; 0: a round of answers is complete
    """

    def __init__(self) -> None:
        self.chunk_tokens = 0
        self._by_id: dict[str, ConversationKV] = {}
        self._round: set[str] = set()  # the conversations in the current round of answers
        self.following = 0
        self._due = float("-inf")

    def due(self, now: float) -> int | None:
        """Returns the start of the range to request now, or None if none is due."""
        if now < self._due:
            return None
        self._due = now + LOOK_INTERVAL_S
        return self.following

    def take(self, stretch: Residency) -> None:
        """Takes the loop's answer. A conversation that is missing in a whole round of answers is
        removed. A range that arrives twice, after two requests, counts once."""
        told = {entry.conversation: entry for entry in stretch.conversations}
        self._by_id |= told
        if stretch.start != self.following:
            return
        self.chunk_tokens, self.following = stretch.chunk_tokens, stretch.following
        self._round |= told.keys()
        if not stretch.following:
            for gone in self._by_id.keys() - self._round:
                del self._by_id[gone]
            self._round = set()

    def find(self, name: str) -> ConversationKV | None:
        """Finds by the loop's own name (`turns.kv_name`). None: the conversation has not been
        active since the loop began."""
        return self._by_id.get(name)

    def of(self, owner: str) -> Iterator[ConversationKV]:
        """The owner's conversations, the latest first, under the owner's names (see
        `turns.kv_name`)."""
        prefixes = tuple(f"{kind}:{owner}:" for kind in ("conversation", "response", "session"))
        for name, entry in reversed(self._by_id.items()):
            if name.startswith(prefixes):
                yield entry._replace(conversation=name.split(":", 2)[2])
            elif not owner:
                yield entry
