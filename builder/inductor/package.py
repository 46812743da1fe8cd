"""Runs a package that `compile.py` made: machine code without weights, which are passed to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...plugins.linear.fp8_format import FP8
from ..checkpoints.config import DecoderConfig
from ..forward_batch import ForwardBatch

# its module registers torch.ops.pensieve, which packages call
from ..model import rotary_frequencies

LOOKED_UP = ("embed.weight", "positions.weight")


def laid_out(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with the strides that packages are compiled for; shapes and values are
    unchanged.

    On a CPU projections are stored column by column, because a step of few tokens then reads them
    twice as fast. On a GPU nothing changes, and projections in FP8 or int4 never change. Tensors
    are processed one after the other.
    """
    return {
        name: _by_columns(tensor) if _is_projection(name, tensor) else tensor
        for name, tensor in weights.items()
    }


def _is_projection(name: str, weight: Tensor) -> bool:
    return (
        weight.dim() == 2 and name not in LOOKED_UP and weight.dtype != FP8 and not weight.is_cuda
    )


def _by_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


class Package:
    """The forward pass of a decoder. It uses the caller's weight tensors, so memory holds one
    copy."""

    def __init__(self, path: Path, config: DecoderConfig, weights: Mapping[str, Tensor]):
        """weights: from `laid_out`, on the package's device. RuntimeError if the file is not a
        package."""
        # Without further threads: it can be captured in a CUDA graph, and our operations run in the
        # calling thread.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
        device = weights["embed.weight"].device
        constants = {**weights, "frequencies": rotary_frequencies(config).to(device)}
        # kept here, because the loader keeps only addresses
        self._constants = {name: constants[name] for name in self._loader.get_constant_fqns()}
        # active, complete, managed by the caller
        self._loader.load_constants(self._constants, False, True, True)

    def __call__(self, batch: ForwardBatch, pool: int) -> Tensor:
        """Computes what `Decoder.forward` does."""
        (logits,) = self._loader.run([*batch.tensors(), torch.tensor(pool)])
        return logits
