"""Where the chunks of all conversations are, as the loop last said. Nothing is asked while nobody looks."""

from __future__ import annotations

from collections.abc import Iterator

from ...scheduler.types import ConversationKV, Residency

LOOK_INTERVAL_S = 0.25


class ResidencyView:
    """The loop tells one stretch at a time, so that many conversations never cost it a long pause.

    chunk_tokens    of every chunk; 0 before the first answer
    following       the stretch to be asked for next; 0: a round of answers is whole
    """

    def __init__(self) -> None:
        self.chunk_tokens = 0
        self._by_id: dict[str, ConversationKV] = {}
        self._round: set[str] = set()  # those told of since the loop last began with the first
        self.following = 0
        self._due = float("-inf")

    def due(self, now: float) -> int | None:
        """The stretch to ask the loop for now, if one is due."""
        if now < self._due:
            return None
        self._due = now + LOOK_INTERVAL_S
        return self.following

    def take(self, stretch: Residency) -> None:
        """The loop's answer. Who has not been in a whole round of answers is gone; one that comes twice, because two
        have asked, counts once."""
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
        """By the loop's own name (`histories.kv_name`). None: it has not been active since the loop began."""
        return self._by_id.get(name)

    def of(self, owner: str) -> Iterator[ConversationKV]:
        """The owner's conversations, the latest first, by the names that the owner knows (`histories.kv_name`)."""
        prefixes = tuple(f"{kind}:{owner}:" for kind in ("conversation", "response", "session"))
        for name, entry in reversed(self._by_id.items()):
            if name.startswith(prefixes):
                yield entry._replace(conversation=name.split(":", 2)[2])
            elif not owner:
                yield entry
