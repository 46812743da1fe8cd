"""Copies words between a GPU and pinned host memory with a kernel instead of a copy engine.

A copy engine does one copy after the other: a step's few kilobytes would wait for a swap-in of
hundreds of megabytes, and delay the step. A kernel accesses host memory itself, while the copy
engines work.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def copy_words(target: Tensor, source: Tensor) -> None:
    """target[:] = source, both [n] int32, contiguous and at addresses that are multiples of 16. One
    of them may be in pinned host memory; its owner must keep it until the current stream has passed
    this point."""
    count = source.numel()
    if target.numel() != count or target.dtype != source.dtype or source.element_size() != 4:
        raise ValueError(
            f"{count} words of {source.dtype} do not fit {target.numel()} of {target.dtype}"
        )
    if count:
        _copy_words[(triton.cdiv(count, BLOCK),)](target, source, count, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _copy_words(target, source, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < count
    # Not cached: the host writes new data there for every step.
    tl.store(target + at, tl.load(source + at, mask=kept, cache_modifier=".cv"), mask=kept)
