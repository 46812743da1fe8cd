"""Compiles the sampler's kernels before they are needed."""

from __future__ import annotations

import torch

from .keep_kernel import keep_samples
from .kept_kernel import lowest_kept


def compile_kernels(vocab: int, device: torch.device | str = "cuda") -> None:
    """Runs each kernel once on a row of `vocab` logits: later all streams would wait while it is
    compiled."""
    id_ = torch.zeros(1, dtype=torch.int64, device=device)
    token = torch.zeros(1, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.float64, device=device)
    logits = torch.zeros(1, vocab, device=device)
    lowest_kept(logits, logits.double(), id_, one, one)
    keep_samples(id_, id_, token.clone(), token)
