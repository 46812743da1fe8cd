"""A GPU pool of KV in eight bits (`--kv-cache-dtype fp8`): its layout, and the reference that reads
and writes it.

The pool is uint8 with a byte more than numbers for each token and head: [slot, layers, 2, kv_heads,
chunk_tokens, head_dim + 1]. The shape counts bytes. Within a layer all codes come first, so they
stay aligned:

    codes [2, kv_heads, chunk_tokens, head_dim] e4m3 | exponents [2, kv_heads, chunk_tokens] of
    float32's format

A number is its code times 2**(exponent - 127). Codes and exponent are those of
`kv_forms.fp8_reference` for the numbers of one token and head. They are written once and depend on
no other token. The decoded number is exact in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kv_forms.fp8_reference import CODES, scales, to_codes

DTYPE = torch.uint8
"""Of a pool in this form, and of no other pool."""


def pool_width(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of any pool of this dtype."""
    return head_dim + 1 if dtype == DTYPE else head_dim


def parts(pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Views of a layer: codes [slots, 2, kv_heads, chunk_tokens, head_dim], exponents [slots, 2,
    kv_heads, chunk_tokens], both uint8."""
    *record, width = pool.shape[2:]
    piece = pool[:, layer].flatten(1)
    count = math.prod(record) * (width - 1)
    return piece[:, :count].unflatten(1, (*record, width - 1)), piece[:, count:].unflatten(
        1, record
    )


def write(pool: Tensor, layer: int, k: Tensor, v: Tensor, slot: Tensor, offset: Tensor) -> None:
    """Writes keys and values [T, kv_heads, head_dim] of tokens at places slot, offset [T]."""
    codes, exponents = parts(pool, layer)
    for i, x in enumerate((k, v)):
        quantized, scale = to_codes(x.float(), (-1,))
        codes[slot, i, :, offset] = quantized.view(DTYPE)
        exponents[slot, i, :, offset] = scale.squeeze(-1).to(DTYPE)


def read(pool: Tensor, layer: int, i: int, slot: Tensor, head: Tensor) -> Tensor:
    """Returns keys (i = 0) or values (1) of whole chunks, [..., chunk_tokens, head_dim] float32.
    `slot` and `head` broadcast."""
    codes, exponents = parts(pool, layer)
    scale = scales(exponents[slot, i, head].int())
    return codes[slot, i, head].view(CODES).float() * scale.unsqueeze(-1)
