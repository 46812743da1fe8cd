"""A record on disk: the KV of one chunk, or a piece of a state, after a page that identifies it.

    | header, one page | payload, filled up to whole pages |

There are two checksums. The header's own shows that the page was written completely, which is
enough to list a directory's records. The record's covers header and payload together. So a payload
that is torn, has flipped bits, or is left from the slot's previous record is never taken for this
one's.

XXH3 of 128 bits, computed without the interpreter's lock: several threads work side by side. The
checksum need not tell keys apart: the whole key, a SHA-256 and the piece's number and computation,
is in the header and is compared.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from ...scheduler.kv.piece_keys import COMPUTATION_BYTES, StatePiece, piece_key, split_key
from ...scheduler.types import ChunkKey

PAGE = 4096
"""Bytes. O_DIRECT requires offsets, lengths and addresses to be multiples of this."""

_MAGIC = b"pensieve"
VERSION = 4
_FIELDS = struct.Struct(f"<8sI32sI{COMPUTATION_BYTES}s32sqdQ")
_CHECKSUMS = struct.Struct("<16s16s")  # of the record, and of the page before this checksum
_CHECKED = _FIELDS.size + 16
NO_PIECE = StatePiece(2**32 - 1, bytes(COMPUTATION_BYTES))  # in the header of KV


class Header(NamedTuple):
    """key     of the chunk or the piece (`piece_key`)
    end        position after its last token
    written    time of writing, seconds since the epoch
    """

    key: ChunkKey
    end: int
    written: float


def record_bytes(payload: int) -> int:
    """Bytes on disk of a record with `payload` bytes of payload."""
    return PAGE + -(-payload // PAGE) * PAGE


def pack_header(
    key: ChunkKey, end: int, origin: bytes, written: float, payload: np.ndarray
) -> bytes:
    """The page before `payload` ([bytes] uint8). `origin`: the 32 bytes of
    `RecordOrigin.digest`."""
    chunk_key, piece = split_key(key)
    fields = _FIELDS.pack(
        _MAGIC, VERSION, chunk_key, *(piece or NO_PIECE), origin, end, written, len(payload)
    )
    head = fields + checksum(fields, payload.data)
    return (head + checksum(head)).ljust(PAGE, b"\0")


def read_header(page: bytes | memoryview, origin: bytes, payload: int) -> Header | None:
    """Returns the page's fields, or None unless the page is complete and belongs to a record of
    this origin and size."""
    magic, version, key, *numbers, written_by, end, written, size = _FIELDS.unpack_from(page)
    _, own = _CHECKSUMS.unpack_from(page, _FIELDS.size)
    if (magic, version, written_by, size) != (_MAGIC, VERSION, origin, payload):
        return None
    if checksum(page[:_CHECKED]) != own:
        return None
    piece = StatePiece(*numbers)
    return Header(ChunkKey(key) if piece == NO_PIECE else piece_key(key, piece), end, written)


def payload_intact(page: bytes | memoryview, payload: np.ndarray) -> bool:
    """Returns whether this header was written with this payload."""
    own, _ = _CHECKSUMS.unpack_from(page, _FIELDS.size)
    return bool(checksum(page[: _FIELDS.size], payload.data) == own)


def checksum(*parts: bytes | memoryview) -> bytes:
    """The checksum of the joined parts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()
