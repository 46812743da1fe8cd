"""Load or recompute: what was chosen for chunks on HOST when their turns got room, and what either way would take.

What loading then took is the link's time (`pensieve:kv_link_seconds`) and what of it steps waited for; metrics set it
beside the predictions.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cost import CostProfile
from .chunk import Chunk


class Choice:
    """chunks, and the predicted seconds of loading them and of recomputing them."""

    __slots__ = ("chunks", "load", "recompute")

    def __init__(self) -> None:
        self.chunks = 0
        self.load = self.recompute = 0.0

    def note(self, chunks: Iterable[Chunk], cost: CostProfile) -> None:
        load = cost.load()
        for chunk in chunks:
            self.chunks += 1
            self.load += load
            self.recompute += cost.recompute(chunk.end)


class LoadOrRecomputeStats:
    """Since the start, by what was chosen."""

    def __init__(self, cost: CostProfile):
        self._cost = cost
        self._loaded, self._recomputed = Choice(), Choice()

    def note(self, loaded: Iterable[Chunk], recomputed: Iterable[Chunk]) -> None:
        self._loaded.note(loaded, self._cost)
        self._recomputed.note(recomputed, self._cost)

    def by_choice(self) -> dict[str, dict[str, float]]:
        """{"load" or "recompute": {"chunks", "load", "recompute"}}."""
        made = {"load": self._loaded, "recompute": self._recomputed}
        return {name: {part: getattr(choice, part) for part in Choice.__slots__} for name, choice in made.items()}
