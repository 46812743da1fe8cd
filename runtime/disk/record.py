"""A record on disk: the KV of one chunk, behind a page that says whose it is.

    | header, one page | payload, filled up to whole pages |

Two checksums tell what may be believed. The header's own says that the page was written whole: enough to list what a
directory holds. The record's covers header and payload together, so a payload that was torn, flipped, or left behind
by the slot's record before never passes for another's.

XXH3 of 128 bits, without the interpreter's lock: several threads work side by side. It need not keep keys apart: the
whole key, a SHA-256, is in the header and is compared.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from ...scheduler.types import ChunkKey

PAGE = 4096
"""Bytes; what O_DIRECT wants offsets, lengths and addresses to be multiples of."""

_MAGIC = b"pensieve"
VERSION = 2
_FIELDS = struct.Struct("<8sI32s32sqdQ")
_CHECKSUMS = struct.Struct("<16s16s")  # of the record, of the page up to here
_CHECKED = _FIELDS.size + 16


class Header(NamedTuple):
    """key        of the chunk
    end        position after its last token
    written    when, seconds since the epoch
    """

    key: ChunkKey
    end: int
    written: float


def record_bytes(payload: int) -> int:
    """Bytes on disk of a record whose payload has so many bytes."""
    return PAGE + -(-payload // PAGE) * PAGE


def pack_header(key: ChunkKey, end: int, origin: bytes, written: float, payload: np.ndarray) -> bytes:
    """The page in front of `payload` ([bytes] uint8). `origin`: 32 bytes that name who may read the record."""
    fields = _FIELDS.pack(_MAGIC, VERSION, key, origin, end, written, len(payload))
    head = fields + _checksum(fields, payload.data)
    return (head + _checksum(head)).ljust(PAGE, b"\0")


def read_header(page: bytes | memoryview, origin: bytes, payload: int) -> Header | None:
    """What the page says; None unless it is whole and of a record of this origin and size."""
    magic, version, key, written_by, end, written, size = _FIELDS.unpack_from(page)
    _, own = _CHECKSUMS.unpack_from(page, _FIELDS.size)
    if (magic, version, written_by, size) != (_MAGIC, VERSION, origin, payload):
        return None
    return Header(ChunkKey(key), end, written) if _checksum(page[:_CHECKED]) == own else None


def payload_intact(page: bytes | memoryview, payload: np.ndarray) -> bool:
    """Whether it is the payload that this header was written with."""
    checksum, _ = _CHECKSUMS.unpack_from(page, _FIELDS.size)
    return bool(_checksum(page[: _FIELDS.size], payload.data) == checksum)


def _checksum(*parts: bytes | memoryview) -> bytes:
    """Of the parts as if they were one."""
    made = xxhash.xxh3_128()
    for part in parts:
        made.update(part)
    return made.digest()
