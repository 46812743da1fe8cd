"""A chunk's record in eight bits: e4m3 codes, with one scale for each layer, key or value, and head.

Layer by layer, one contiguous piece a layer, so that any run of layers of a record is one piece too:

    codes [2, kv_heads, chunk_tokens, head_dim] | scales [2, kv_heads] float32 | zeros up to a multiple of ALIGNMENT

A number is its code times its scale. The scale is the smallest power of two that brings the largest finite number of
its head to 448, the largest code, or below. Against 448 over the largest number itself this costs nothing: e4m3 is a
floating format, and its relative error, 1/16 at most, does not depend on the scale but for numbers below 1/14336 of the
largest. And it makes the round trip exact after the first time: products are exact in every dtype, so what was decoded
is encoded to itself, by the same scale or by a larger one, when new tokens in a chunk are larger than those before.

For the same reason the scale may see all of a chunk, though the rest of a half-filled one holds what was there before:
another chunk's numbers, or zeros, of the same layer and head. What is not finite does not count. NaN stays NaN and an
infinity becomes the largest code: neither changes another number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 128
"""Bytes: a line of the GPU's cache and two of the host's, so that layers share none."""

SMALLEST_SCALE = 32
"""As float32 counts exponents, 2**-95: numbers so small count as zero, and none of the arithmetic is subnormal."""

LARGEST_CODE = 448.0

CODES = torch.float8_e4m3fn


def scales_offset(shape: tuple[int, ...]) -> int:
    """Bytes before a layer's scales; shape as of a pool."""
    return -(-math.prod(shape[2:]) // 4) * 4


def layer_bytes(shape: tuple[int, ...]) -> int:
    """Of a layer of a coded record; shape as of a pool."""
    return -(-(scales_offset(shape) + 4 * math.prod(shape[2:4])) // ALIGNMENT) * ALIGNMENT


def encode(chunks: Tensor) -> Tensor:
    """Records [n, layers, layer_bytes] uint8 of chunks [n, layers, 2, kv_heads, chunk_tokens, head_dim], or layers of
    them."""
    values = chunks.float()
    largest = torch.where(values.isfinite(), values.abs(), 0.0).amax((-2, -1), keepdim=True)
    # Adding 0x1FFFFF carries into the exponent if the mantissa is above that of 448 = 1.75 * 2**8.
    exponents = ((largest.view(torch.int32) + 0x1FFFFF >> 23) - 8).clamp(min=SMALLEST_SCALE)
    inverse = (254 - exponents << 23).view(torch.float32)
    codes = (values * inverse).clamp(-LARGEST_CODE, LARGEST_CODE).to(CODES)
    records = torch.zeros(*chunks.shape[:2], layer_bytes(chunks.shape), dtype=torch.uint8, device=chunks.device)
    count, first = math.prod(chunks.shape[2:]), scales_offset(chunks.shape)
    scales = (exponents << 23).flatten(2).view(torch.uint8)
    records[..., :count] = codes.view(torch.uint8).flatten(2)
    records[..., first : first + scales.shape[-1]] = scales
    return records


def decode(records: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Chunks [n, layers, ...] of `dtype` from records [n, layers, layer_bytes]; shape as of a pool.

    Numbers that rounding took beyond the dtype's largest become that.
    """
    count, first = math.prod(shape[2:]), scales_offset(shape)
    codes = records[..., :count].view(CODES).view(*records.shape[:2], *shape[2:])
    scales = records[..., first : first + 4 * math.prod(shape[2:4])].contiguous().view(torch.float32)
    values = codes.float() * scales.view(*records.shape[:2], *shape[2:4], 1, 1)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)
