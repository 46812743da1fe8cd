"""Projections in compiled engines on a CPU: float32 products by oneDNN, over weights as `package.laid_out` stores them.

PyTorch gives float32 products to MKL, which is slower on batches of 2 to 256 tokens; and inductor gives oneDNN weights
that it has packed, which would be a second copy of them. The compiler gets an operation of ours for `aten.linear`, and
lowers it to oneDNN's kernel over the weights as they are. It is called as compiled code calls any kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

torch.library.define("pensieve::cpu_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("pensieve::cpu_linear")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `aten.linear` becomes in an exported decoder."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return NotImplemented  # as it is
    return torch.ops.pensieve.cpu_linear(x, weight, bias)


def register_lowering() -> None:
    """Tells inductor. Once a process."""
    from torch._inductor import mkldnn_ir
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    class UnpackedLinear(mkldnn_ir.LinearUnary):
        """Takes weights with the strides they have, where its parent would copy them in each step."""

        @classmethod
        def require_contiguous(cls, x: Any) -> Any:
            return x if x.get_name() in V.graph.constants else super().require_contiguous(x)

    @register_lowering(torch.ops.pensieve.cpu_linear.default, type_promotion_kind=None)
    def lower(x: Any, weight: Any, bias: Any) -> Any:
        return TensorBox.create(UnpackedLinear.create(x, weight, bias, "none", [], ""))
