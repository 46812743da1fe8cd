"""Matrix products on a CPU with weights in the order that oneDNN multiplies fastest: 1.2 to 2.7
times as fast as `torch.nn.functional.linear` for up to 64 rows.

PyTorch's compiler uses the same two operations of `torch.ops.mkldnn`. They keep memory for each
number of rows that they have seen, as much as the product takes. So only few numbers reach them:
rows are divided into blocks, and a block is padded by at most an eighth.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""oneDNN chooses the order for about so many rows; it is as fast with fewer, and with many."""

BLOCK = 256
"""Most rows of one product. 1,024 rows take 4% longer than at once."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies packed weights of this dtype."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return dtype == torch.float32


def packed(weight: Tensor) -> Tensor:
    """A copy of a weight [outputs, inputs] for `linear`. Only `linear` can read it."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return reordered


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of x [T, inputs] and a weight, packed or not; returns [T, outputs]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if len(x) <= BLOCK:
        return _padded_product(x, weight, bias)
    product = x.new_empty(len(x), weight.shape[0])
    for start in range(0, len(x), BLOCK):
        block = slice(start, start + BLOCK)
        product[block] = _padded_product(x[block], weight, bias)
    return product


def padded_rows(rows: int) -> int:
    """A number of rows that is multiplied: `rows` up to 16, then at most an eighth more."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


def _padded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(x)
    padding = padded_rows(rows) - rows
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:rows]
