"""Keys of states' pieces, made from the key of the chunk that ends where the state does."""

from __future__ import annotations

from typing import NamedTuple

from ..types import ChunkKey

KEY_BYTES = 32  # of a chunk's key
COMPUTATION_BYTES = 8


class StatePiece(NamedTuple):
    """number      of the piece in its state, from 0
    computation    random bytes, the same in all pieces of a state: a state of the same key that is
                   computed again has others, because its bits may differ
    """

    number: int
    computation: bytes


def piece_key(key: ChunkKey, piece: StatePiece) -> ChunkKey:
    """The key of a state's piece. `key`: of the chunk that ends where the state does. No chunk of
    KV has such a key: it is longer."""
    return ChunkKey(key + piece.computation + piece.number.to_bytes(4, "big"))


def state_key(key: ChunkKey) -> ChunkKey:
    """The key of the one record that has all pieces of the state, in a store that several servers
    share. No chunk and no piece has such a key."""
    return ChunkKey(key + b"state")


def is_kv(key: ChunkKey) -> bool:
    """False: the key of a state or of its piece."""
    return len(key) <= KEY_BYTES


def split_key(key: ChunkKey) -> tuple[ChunkKey, StatePiece | None]:
    """The chunk's key and the piece, None for KV, of a key that `chunk_key` or `piece_key` made."""
    if is_kv(key):
        return key, None
    number = KEY_BYTES + COMPUTATION_BYTES
    piece = StatePiece(int.from_bytes(key[number:], "big"), key[KEY_BYTES:number])
    return ChunkKey(key[:KEY_BYTES]), piece
