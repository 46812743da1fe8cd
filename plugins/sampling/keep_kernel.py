"""Keeps a step's tokens: for the next step on the device, and for the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def keep_samples(drawn: Tensor, seats: Tensor, last_samples: Tensor, tokens: Tensor) -> None:
    """tokens[:] = drawn and last_samples[seats] = drawn, in one launch.

    drawn, seats [R] int64; last_samples [seats] int32; tokens [R] int32, in pinned host memory: its
    owner must keep it until the current stream has passed this point.
    """
    count = drawn.numel()
    if count:
        _keep[(triton.cdiv(count, BLOCK),)](drawn, seats, last_samples, tokens, count, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["count"])
def _keep(drawn, seats, last_samples, tokens, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token = tl.load(drawn + at, mask=inside, other=0).to(tl.int32)
    seat = tl.load(seats + at, mask=inside, other=0)
    tl.store(tokens + at, token, mask=inside)
    tl.store(last_samples + seat, token, mask=inside)
