"""How published checkpoints store a projection in int4: three or two tensors, whose int32 words
have eight numbers.

    AWQ                 qweight [in, out / 8], qzeros [in / group, out / 8], scales [in / group,
                        out]
    GPTQ                qweight [in / 8, out], qzeros [in / group, out / 8], scales [in / group,
                        out]
    compressed-tensors  weight_packed [out, in / 8], weight_zero_point [out / 8, in / group],
                        weight_scale [out, in / group]

A number q means (q - zero point) * scale. Words have their first number in the lowest bits; AWQ's
have the eight in another order. Without stored zero points, they are 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..plugins.linear.int4_format import MIDDLE

if TYPE_CHECKING:  # reading a config.json needs no torch
    from torch import Tensor

IN_A_WORD = 8
IN_ORDER = tuple(range(IN_A_WORD))


class Int4Layout(NamedTuple):
    """The names of a projection's tensors behind the module's, their dimensions, and the order of
    numbers.

    inputs_first  tensors are [in, out], else [out, in]
    packed        the dimension along which a word of weights has its numbers; `zeros_packed`: a
                  word of zero points
    places        for each of eight neighbours, its place in the word
    order, shape  the group of each input, which must be in order, and the size: "" if not stored
    """

    weight: str
    zeros: str
    scales: str
    inputs_first: bool
    packed: int
    zeros_packed: int
    places: Sequence[int] = IN_ORDER
    order: str = ""
    shape: str = ""


AWQ = Int4Layout("qweight", "qzeros", "scales", True, 1, 1, (0, 4, 1, 5, 2, 6, 3, 7))
GPTQ = Int4Layout("qweight", "qzeros", "scales", True, 0, 1, order="g_idx")
COMPRESSED = Int4Layout(
    "weight_packed",
    "weight_zero_point",
    "weight_scale",
    False,
    1,
    0,
    order="weight_g_idx",
    shape="weight_shape",
)

WORDS = tuple(
    f".{name}" for layout in (AWQ, GPTQ, COMPRESSED) for name in (layout.weight, layout.zeros)
)
"""The ends of the names of tensors that hold words."""


class Int4(NamedTuple):
    """The int4 projections of one checkpoint. `group`: inputs that share a scale; `zero_points`:
    False if they are not stored; `zero_offset`: what is missing in the stored ones, 1 in GPTQ's
    first format."""

    layout: Int4Layout
    group: int
    zero_points: bool = True
    zero_offset: int = 0

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor of a projection, by the end of its name."""
        layout = self.layout
        groups = inputs // self.group
        shapes = {
            layout.weight: self._shape(outputs, inputs, layout.packed),
            layout.scales: self._shape(outputs, groups, None),
        }
        if self.zero_points:
            shapes[layout.zeros] = self._shape(outputs, groups, layout.zeros_packed)
        return shapes

    def numbers(self, read: Callable[[str], Tensor]) -> Tensor:
        """[out, in] uint8. `read` returns a tensor by the end of its name."""
        return self._outputs_first(self._unpacked(read(self.layout.weight), self.layout.packed))

    def scales(self, read: Callable[[str], Tensor]) -> Tensor:
        """[out, in / group] float32."""
        return self._outputs_first(read(self.layout.scales).float())

    def zeros(self, read: Callable[[str], Tensor]) -> Tensor:
        """The zero points [out, in / group] float32, integers from 0 to 16."""
        if not self.zero_points:
            scales = self.scales(read)
            return scales.new_full(scales.shape, MIDDLE)
        stored = self._unpacked(read(self.layout.zeros), self.layout.zeros_packed)
        return self._outputs_first(stored.float() + self.zero_offset)

    def _shape(self, outputs: int, inputs: int, packed: int | None) -> tuple[int, ...]:
        sizes = [inputs, outputs] if self.layout.inputs_first else [outputs, inputs]
        if packed is not None:
            sizes[packed] //= IN_A_WORD
        return tuple(sizes)

    def _outputs_first(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.layout.inputs_first else tensor

    def _unpacked(self, words: Tensor, dim: int) -> Tensor:
        shifts = words.new_tensor(self.layout.places).mul_(4).view(-1, *[1] * (1 - dim))
        return (words.unsqueeze(dim + 1) >> shifts & 15).byte().flatten(dim, dim + 1)
