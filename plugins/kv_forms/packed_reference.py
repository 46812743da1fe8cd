"""A chunk's record of bfloat16 numbers, exact, in about 12.5 bits each: exponents of a channel are
close to each other.

The record stores layer by layer, each layer contiguous, so any range of layers is contiguous too:

    lows    [2, kv_heads, chunk_tokens, head_dim] uint8: sign << 7 | mantissa
    codes   [2, kv_heads, chunk_tokens / 2, head_dim] uint8: of token t, and << 4 that of token t +
            chunk_tokens / 2
    bases   [2, kv_heads, head_dim] uint8: the largest exponent of a channel, in bfloat16's encoding
    zeros up to a multiple of 4
    escapes [2, kv_heads, E] int32: position << 16 | all 16 bits, in the order of tokens 0,
    chunk_tokens / 2, 1 and so on, as codes pair them, then of channels; zeros after the last
    counts  [2, kv_heads] int32: number of a head's escapes, even if it exceeds E
    zeros up to a multiple of ALIGNMENT

A number's code is the distance of its exponent below its channel's base, 0 to 13; or 14 if its
exponent is 0 (zeros and subnormals, which sign and mantissa describe completely); or 15 for all
other numbers. These are escapes, listed with their position in the head, token * head_dim +
channel. Infinities and NaN have an exponent like others. Of normally distributed numbers about 1 in
5,700 is an escape, and E has room for 1 in 128. With more escapes in any head the record is a
failed copy: `is_exact` returns False, no reader may use the record, and the chunk is recomputed
when it is needed.

The rest of a half-filled chunk is encoded like its tokens: its old data is restored too, and takes
room if its exponents differ.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes: a cache line of the GPU and two of the host, so no two layers share a line."""

ZERO, ESCAPE = 14, 15
"""Codes that are not a distance from the base."""


class Layout(NamedTuple):
    """A layer of a record: the places of its parts, in bytes, its length, and E, the room for a
    head's escapes."""

    codes: int
    bases: int
    escapes: int
    counts: int
    length: int
    room: int


@cache
def layout(shape: tuple[int, ...]) -> Layout:
    """shape: as of a pool. ValueError if a chunk's number of tokens is odd or a head has over
    65,536 numbers."""
    heads = math.prod(shape[2:4])
    tokens, channels = shape[4:]
    if tokens % 2 or tokens * channels > 65536:
        raise ValueError(
            "packed chunks have an even number of tokens and at most 65,536 numbers a head, not "
            f"{tokens} x {channels}"
        )
    room = max(4, tokens * channels // 128)
    codes = heads * tokens * channels
    bases = codes + codes // 2
    escapes = -(-(bases + heads * channels) // 4) * 4
    counts = escapes + 4 * heads * room
    return Layout(
        codes, bases, escapes, counts, -(-(counts + 4 * heads) // ALIGNMENT) * ALIGNMENT, room
    )


def layer_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a layer of a record; shape as of a pool. Errors as `layout`."""
    return layout(tuple(shape)).length


def is_exact(record: np.ndarray, shape: tuple[int, ...]) -> bool:
    """Returns whether a whole record [layers * layer_bytes] uint8 is exact: every head's escapes
    are all listed."""
    at = layout(shape)
    counts = record.reshape(shape[1], at.length)[:, at.counts : at.counts + 4 * shape[2] * shape[3]]
    return bool(counts.view(np.int32).max() <= at.room)


def encode(chunks: Tensor) -> Tensor:
    """Returns records [n, layers, layer_bytes] uint8 of bfloat16 chunks [n, layers, 2, kv_heads,
    chunk_tokens, head_dim], or of some layers of them."""
    if chunks.dtype != torch.bfloat16:
        raise ValueError(f"packed chunks are bfloat16, not {chunks.dtype}")
    at = layout(tuple(chunks.shape))
    bits = chunks.contiguous().view(torch.int16).int() & 0xFFFF
    exponents = bits >> 7 & 0xFF
    bases = exponents.amax(-2, keepdim=True)
    distances = bases - exponents
    codes = torch.where(exponents == 0, ZERO, torch.where(distances < ZERO, distances, ESCAPE))
    first, second = codes.chunk(2, dim=-2)

    # [heads of all layers, chunk_tokens / 2, 2, head_dim]
    pairs = torch.stack((first, second), dim=-2).flatten(0, -4)
    head, token, half, channel = (pairs == ESCAPE).nonzero(as_tuple=True)
    position = (half * len(pairs[0]) + token) * pairs.shape[-1] + channel
    counts = torch.bincount(head, minlength=len(pairs))
    rank = torch.arange(len(head), device=chunks.device) - (counts.cumsum(0) - counts)[head]
    listed = rank < at.room
    head = head[listed]
    position = position[listed]
    rank = rank[listed]
    escapes = torch.zeros(len(counts), at.room, dtype=torch.int32, device=chunks.device)
    escapes[head, rank] = position.int() << 16 | bits.view(len(pairs), -1)[head, position]

    records = torch.zeros(*chunks.shape[:2], at.length, dtype=torch.uint8, device=chunks.device)
    parts = {
        0: (bits >> 8 & 0x80 | bits & 0x7F).byte(),
        at.codes: (first | second << 4).byte(),
        at.bases: bases.byte(),
        at.escapes: escapes.view(torch.uint8),
        at.counts: counts.int().view(torch.uint8),
    }
    for start, part in parts.items():
        piece = part.reshape(*chunks.shape[:2], -1)
        records[..., start : start + piece.shape[-1]] = piece
    return records


def decode(records: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns chunks [n, layers, ...] of `dtype`, bfloat16, from records [n, layers, layer_bytes];
    shape as of a pool.

    Records that are not exact produce arbitrary chunks.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"packed chunks are bfloat16, not {dtype}")
    at = layout(tuple(shape))
    tokens, channels = shape[4:]
    heads = (*records.shape[:2], *shape[2:4])
    lows = records[..., : at.codes].reshape(*heads, tokens, channels).int()
    pairs = records[..., at.codes : at.bases].reshape(*heads, tokens // 2, channels).int()
    bases = (
        records[..., at.bases :][..., : math.prod(shape[2:4]) * channels]
        .reshape(*heads, 1, channels)
        .int()
    )
    codes = torch.cat((pairs & 0xF, pairs >> 4), dim=-2)
    exponents = torch.where(codes == ZERO, 0, bases - codes)
    bits = ((lows & 0x80) << 8 | exponents << 7 | lows & 0x7F).short()

    words = records[..., at.escapes : at.counts].contiguous().view(torch.int32).view(-1, at.room)
    counts = (
        records[..., at.counts :][..., : 4 * math.prod(shape[2:4])]
        .contiguous()
        .view(torch.int32)
        .view(-1, 1)
    )
    positions = words >> 16 & 0xFFFF
    listed = (torch.arange(at.room, device=records.device) < counts) & (
        positions < tokens * channels
    )
    head, rank = listed.nonzero(as_tuple=True)
    bits.view(len(words), -1)[head, positions[head, rank]] = words[head, rank].short()
    return bits.view(dtype)
