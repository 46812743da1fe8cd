"""The recurrent states that are kept on HOST and below, each as several chunks: its pieces
(docs/design/states.md)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ..config import StateConfig
from ..types import HOST, ChunkKey
from .chunk import NO_SLOT, Chunk, State
from .chunk_store import ChunkStore
from .piece_keys import COMPUTATION_BYTES, StatePiece, piece_key
from .whereabouts import shared_only


class KeptStates:
    """by_key   the states at multiples of `StateConfig.multiple`, by the key of the chunk that ends
              there
    kept, swapped_in, lost
              counts since the start: states copied out, copied in, and evicted or lost
    """

    def __init__(self, config: StateConfig, store: ChunkStore):
        self.config = config
        self._store = store
        store.lose_state = self._lose
        self.by_key: dict[ChunkKey, State] = {}
        self._unwanted: list[State] = []
        self._learned: set[State] = set()  # states of the shared tier that no row has used yet
        self.kept = self.swapped_in = self.lost = 0

    def counts(self) -> dict[str, int]:
        return {"kept": self.kept, "swapped_in": self.swapped_in, "lost": self.lost}

    def has(self, key: ChunkKey | None) -> bool:
        """True if a tier of this server has the key's state, or it is being read. One that only the
        shared tier has is often never read."""
        state = None if key is None else self.by_key.get(key)
        return state is not None and not all(
            shared_only(piece) and piece.moving is None for piece in state.pieces
        )

    def keep(self, state: State, pieces: list[Chunk], host_slots: Sequence[int]) -> None:
        """The copy of the state to these HOST slots, one for each of its new pieces, has begun. It
        takes the place of one that only the shared tier has."""
        if state.key is not None and state.key in self.by_key:
            self.forget(self.by_key[state.key])
        state.pieces = pieces
        keys: Sequence[ChunkKey | None] = [None] * len(pieces)
        if state.key is not None:
            keys = self._piece_keys(state.key)
        for piece, key, slot in zip(pieces, keys, host_slots, strict=True):
            piece.state = state
            piece.key = key
            piece.tokens = 1  # nothing else of a piece is counted in tokens
            self._store.add_piece(piece, slot, state.pinned)
        self._find_by_key(state)
        self.kept += 1

    def _piece_keys(self, key: ChunkKey) -> list[ChunkKey]:
        computation = secrets.token_bytes(COMPUTATION_BYTES)
        numbers = range(self.config.chunks)
        return [piece_key(key, StatePiece(number, computation)) for number in numbers]

    def learn(self, key: ChunkKey, end: int, now: float) -> Sequence[Chunk]:
        """The shared tier has the state of this key, which is not here. Returns its pieces; the
        caller touches them as `ChunkStore.learn` says. The state is told of when it is first
        used."""
        state = self.by_key[key] = State(end, NO_SLOT, key)
        for one in self._piece_keys(key):
            piece = self._store.learn(one, end, now)
            piece.state = state
            piece.tokens = 1
            state.pieces.append(piece)
        self._learned.add(state)
        return state.pieces

    def used(self, state: State) -> None:
        """A row has copied the state in."""
        self.swapped_in += 1
        self._learned.discard(state)
        if state.key is not None and self.by_key.get(state.key) is state:
            self._store.note_state(state.key, state.end)

    def can_swap_in(self, state: State) -> bool:
        """True if the state is on HOST, and known to be complete where copies may fail."""
        return self.can_read(state) and all(piece.slots[HOST] >= 0 for piece in state.pieces)

    def can_read(self, state: State) -> bool:
        """True if the state is on HOST or below, and known to be complete where copies may fail."""
        return bool(state.pieces) and not any(map(self._store.unconfirmed, state.pieces))

    def pin(self, state: State, pinned: bool) -> None:
        """The state's conversation is pinned, or is not any more."""
        if state.pinned != pinned:
            state.pinned = pinned
            for piece in state.pieces:
                self._store.change_pins(piece, 1 if pinned else -1)

    def forget(self, state: State) -> None:
        """Nothing looks for the state any more."""
        if not state.unwanted:
            state.unwanted = True
            self._lose_key(state)
            self._unwanted.append(state)

    def drop_unwanted(self) -> None:
        """Drops states that nothing looks for and no row is to swap in. Called when a plan begins,
        so no copy of this plan uses their slots."""
        waiting = []
        for state in self._unwanted:
            if any(piece.users for piece in state.pieces):
                waiting.append(state)
            else:
                self._drop(state)
        self._unwanted = waiting

    def delete(self, key: ChunkKey) -> Sequence[Chunk]:
        """The chunk of this key is deleted. Returns the pieces of the states there, forgotten ones
        too, which the caller drops as far as no row is to swap them in."""
        state = self.by_key.get(key)
        if state is not None:
            self.forget(state)
        return [piece for state in self._unwanted if state.key == key for piece in state.pieces]

    def adopt(self, state: State, pieces: list[Chunk]) -> None:
        """An earlier process left the state, which has a key, in a lower tier."""
        self._find_by_key(state)
        state.pieces = pieces
        for piece in pieces:
            piece.state = state
            self._store.update_victim_set(piece)

    def _lose(self, state: State) -> None:
        """A piece has been dropped, and all others with it."""
        if state.pieces:
            self.lost += not (state.unwanted or state in self._learned)
            self._drop(state)

    def _drop(self, state: State) -> None:
        pieces, state.pieces = state.pieces, []
        self._lose_key(state)
        self._learned.discard(state)
        for piece in pieces:
            if piece.resident:
                self._store.drop(piece)

    def _find_by_key(self, state: State) -> None:
        if state.key is not None:
            self.by_key[state.key] = state
            self._store.note_state(state.key, state.end)

    def _lose_key(self, state: State) -> None:
        if state.key is not None and self.by_key.get(state.key) is state:
            del self.by_key[state.key]
            self._store.note_state(state.key, 0)
