"""Packs a decoder's weights for this CPU."""

from __future__ import annotations

from torch import nn

from ..plugins.linear.cpu_packed import can_pack, packed
from .layers.parts import Projection
from .model import Decoder


def pack(decoder: Decoder) -> None:
    """Puts weights into the order that this CPU multiplies fastest, where it has one.

    Embeddings that are also the head's weight are then kept twice. A packed decoder cannot be
    exported.
    """
    if not can_pack(decoder.embed.weight.dtype):
        return
    if decoder.head is None:
        rows, width = decoder.embed.weight.shape
        decoder.head = nn.Linear(width, rows, bias=False, device="meta")
        decoder.head.weight = decoder.embed.weight
    projections = [module for module in decoder.modules() if isinstance(module, Projection)]
    plain = [part for part in projections if part.scale is None and part.scales_zeros is None]
    for linear in (decoder.head, *plain):
        linear.weight = nn.Parameter(packed(linear.weight), requires_grad=False)
