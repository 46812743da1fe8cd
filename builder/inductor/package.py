"""Runs what `compile_inductor` made: a package of machine code without weights, which are handed over to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...plugins import torch_ops  # noqa: F401  register torch.ops.pensieve, which packages call
from ...plugins.linear import fp8 as fp8_linear  # noqa: F401  register torch.ops.pensieve, which packages call
from ...plugins.linear.fp8_format import FP8
from ..checkpoints.config import DecoderConfig

LOOKED_UP = ("embed.weight", "positions.weight")


def laid_out(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the strides that packages are compiled for: of the same shapes, and values.

    On a CPU projections are stored column by column, as a step of few tokens reads them twice as quickly so; on a GPU
    nothing changes, and nothing of those in FP8. Tensors are taken one after the other.
    """
    return {name: _by_columns(tensor) if _is_projection(name, tensor) else tensor for name, tensor in weights.items()}


def _is_projection(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and name not in LOOKED_UP and weight.dtype != FP8 and not weight.is_cuda


def _by_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


class Package:
    """The forward pass of a decoder. The weights stay the caller's own tensors: there is one copy in memory."""

    def __init__(self, path: Path, config: DecoderConfig, weights: Mapping[str, Tensor]):
        """weights as `laid_out` gives them, on the package's device. RuntimeError if the file is no package."""
        # Without threads of its own: it can be captured in a CUDA graph, and our operations run where they are called.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
        device = weights["embed.weight"].device
        known = {**weights, "frequencies": _frequencies(config).to(device)}
        self._constants = {name: known[name] for name in self._loader.get_constant_fqns()}  # it keeps addresses only
        self._loader.load_constants(self._constants, False, True, True)  # active, all of them, managed by us

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        segments: Tensor,
        block_table: Tensor,
        sample_rows: Tensor,
        pool: int,
    ) -> Tensor:
        """As `Decoder.forward`."""
        handle = torch.tensor(pool)
        (logits,) = self._loader.run([token_ids, positions, slots, segments, block_table, sample_rows, handle])
        return logits


def _frequencies(config: DecoderConfig) -> Tensor:
    """The one constant that no checkpoint holds."""
    return torch.tensor(config.rotary.frequencies() if config.rotary else [], dtype=torch.float64)
