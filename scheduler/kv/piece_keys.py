"""Keys of states' pieces, made from the key of the chunk that ends where the state does."""

from __future__ import annotations

from ..types import ChunkKey

KEY_BYTES = 32  # of a chunk's key


def piece_key(key: ChunkKey, number: int) -> ChunkKey:
    """The key of a state's piece, numbered from 0. `key`: of the chunk that ends where the state
    does. No chunk of KV has such a key: it is longer."""
    return ChunkKey(key + number.to_bytes(4, "big"))


def split_key(key: ChunkKey) -> tuple[ChunkKey, int | None]:
    """The chunk's key and the piece's number, None for KV, of a key that `chunk_key` or `piece_key`
    made."""
    if len(key) <= KEY_BYTES:
        return key, None
    return ChunkKey(key[:KEY_BYTES]), int.from_bytes(key[KEY_BYTES:], "big")
