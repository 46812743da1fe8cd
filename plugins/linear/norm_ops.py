"""Norms and the SiLU gate as torch operations: `torch.ops.pensieve.norm`, `.add_norm` and
`.silu_gate`. On the CPU they are plain PyTorch (`norm_reference`, which describes them), on a GPU
one kernel each (`norm_kernel`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import norm_reference

torch.library.define(
    "pensieve::norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms, bool plus_one=False) -> Tensor",
)
torch.library.define(
    "pensieve::add_norm",
    "(Tensor x, Tensor y, Tensor? weight, Tensor? bias, float eps, bool rms, bool plus_one=False) "
    "-> (Tensor, Tensor)",
)
torch.library.define("pensieve::silu_gate", "(Tensor x) -> Tensor")

torch.library.impl("pensieve::norm", "cpu", norm_reference.norm)
torch.library.impl("pensieve::add_norm", "cpu", norm_reference.add_norm)
torch.library.impl("pensieve::silu_gate", "cpu", norm_reference.silu_gate)


@torch.library.impl("pensieve::norm", "cuda")
def _norm_cuda(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> Tensor:
    from . import norm_kernel  # imported here because only CUDA installations have Triton

    return norm_kernel.norm(x, weight, bias, eps, rms, plus_one)


@torch.library.impl("pensieve::add_norm", "cuda")
def _add_norm_cuda(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    from . import norm_kernel

    return norm_kernel.add_norm(x, y, weight, bias, eps, rms, plus_one)


@torch.library.impl("pensieve::silu_gate", "cuda")
def _silu_gate_cuda(x: Tensor) -> Tensor:
    from . import norm_kernel

    return norm_kernel.silu_gate(x)


@torch.library.register_fake("pensieve::norm")
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pensieve::add_norm")
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("pensieve::silu_gate")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)
