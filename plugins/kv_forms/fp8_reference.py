"""A chunk's record in eight bits: e4m3 codes, with one scale for each layer, key or value, and
head.

The record stores layer by layer, each layer contiguous, so any range of layers is contiguous too:

    codes [2, kv_heads, chunk_tokens, head_dim] | scales [2, kv_heads] float32 | zeros up to a
    multiple of ALIGNMENT

A number is its code times its scale. The scale is the smallest power of two that brings the largest
finite number of its head to 448, the largest code, or below. This is as precise as a scale of the
largest number over 448: e4m3 is a floating format, and its relative error, at most 1/16, does not
depend on the scale, except for numbers below 1/14336 of the largest. And further round trips are
exact: products are exact in every dtype, so decoded numbers are encoded to themselves, with the
same scale or with a larger one, if new tokens in a chunk are larger than the earlier ones.

For the same reason the scale may be computed from all of a chunk, although the rest of a
half-filled chunk contains old data: another chunk's numbers, or zeros, of the same layer and head.
Numbers that are not finite do not count for the scale. NaN stays NaN and an infinity becomes the
largest code; neither changes another number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes: a cache line of the GPU and two of the host, so no two layers share a line."""

SMALLEST_SCALE = 32
"""In float32's exponent, 2**-95: smaller numbers become zero, and no arithmetic is subnormal."""

LARGEST_CODE = 448.0

CODES = torch.float8_e4m3fn


def scales_offset(shape: tuple[int, ...]) -> int:
    """Bytes before a layer's scales; shape as of a pool."""
    return -(-math.prod(shape[2:]) // 4) * 4


def layer_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a layer of a coded record; shape as of a pool."""
    return -(-(scales_offset(shape) + 4 * math.prod(shape[2:4])) // ALIGNMENT) * ALIGNMENT


def to_codes(values: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns codes of float32 numbers, and exponents, int32, of their scales as `scales` takes
    them. Numbers along `dims` share a scale; the exponents keep these dimensions, of size 1."""
    largest = torch.where(values.isfinite(), values.abs(), 0.0).amax(dims, keepdim=True)
    # Adding 0x1FFFFF carries into the exponent if the mantissa is above that of 448 = 1.75 * 2**8.
    exponents = ((largest.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=SMALLEST_SCALE)
    inverse = (254 - exponents << 23).view(torch.float32)
    return (values * inverse).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES), exponents


def scales(exponents: Tensor) -> Tensor:
    """Float32 powers of two by their exponents in float32's format, int32."""
    return (exponents << 23).view(torch.float32)


def encode(chunks: Tensor) -> Tensor:
    """Returns records [n, layers, layer_bytes] uint8 of chunks [n, layers, 2, kv_heads,
    chunk_tokens, head_dim], or of some layers of them."""
    codes, exponents = to_codes(chunks.float(), (-2, -1))
    records = torch.zeros(
        *chunks.shape[:2], layer_bytes(chunks.shape), dtype=torch.uint8, device=chunks.device
    )
    count = math.prod(chunks.shape[2:])
    first = scales_offset(chunks.shape)
    written = scales(exponents).flatten(2).view(torch.uint8)
    records[..., :count] = codes.view(torch.uint8).flatten(2)
    records[..., first : first + written.shape[-1]] = written
    return records


def decode(records: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns chunks [n, layers, ...] of `dtype` from records [n, layers, layer_bytes]; shape as of
    a pool.

    Numbers that rounding made larger than the dtype's largest become the largest.
    """
    count = math.prod(shape[2:])
    first = scales_offset(shape)
    codes = records[..., :count].view(CODES).view(*records.shape[:2], *shape[2:])
    read = records[..., first : first + 4 * math.prod(shape[2:4])].contiguous().view(torch.float32)
    values = codes.float() * read.view(*records.shape[:2], *shape[2:4], 1, 1)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)
