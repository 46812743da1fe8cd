"""The inputs of the forward pass, each declared and described once. Layouts, the order in which
compiled code takes them, and the sizes that may differ between batches are derived from here.

A new input is a field, the code that fills it (`StepPacker.pack` in serving, `parity.batch_of` in
checks), and the layer that reads it. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Array = TypeVar("Array", "np.ndarray", "Tensor")

SIZES = TOKENS, SEGMENTS, ROWS, SEATS, BLOCKS = "tokens", "segments", "rows", "seats", "blocks"
NOT_WRITTEN = -1  # in place of a slot: it was given none, or this token's KV exists already
NO_STATE = -1  # in place of a state's slot


class InputShape(NamedTuple):
    """The shape of an input, all int32.

    sizes     numbers, and names of sizes that differ between batches
    padding   the value of entries beyond those of a batch
    """

    sizes: tuple[int | str, ...]
    padding: int = 0

    def shape(self, named: Mapping[str, int]) -> tuple[int, ...]:
        """With these values of the sizes that have a name."""
        return tuple(named[size] if isinstance(size, str) else size for size in self.sizes)


def shaped(*sizes: int | str, padding: int = 0) -> dict[str, InputShape]:
    """The metadata of an input's field."""
    return {"input": InputShape(sizes, padding)}


def inputs_of(batch: type[Any]) -> dict[str, InputShape]:
    """The inputs of a class of batches, by name, in the order of its fields. Other fields are left
    out."""
    return {one.name: one.metadata["input"] for one in fields(batch) if "input" in one.metadata}


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch(Generic[Array]):
    """What the host lays out anew for each step: T tokens of any mixture of requests, in S
    segments; R rows are sampled or scored. All int32.

    token_ids    [T]
    positions    [T], as the model counts them
    slots        [T], the place of each token's KV: slot * chunk_tokens + offset, or NOT_WRITTEN
    segments     [S, 5]: q_start, q_len, kv_start, kv_len in the row's coordinates, seat (see
                 `plugins.attention.reference`)
    sample_rows  [R], indices into the T tokens whose logits are computed
    state_in     [S], the slot of the state in front of each segment; NO_STATE: the zero state
    state_out    [S], the slot that gets the state behind it; NO_STATE: it is not kept. It may be
                 the segment's state_in, but not another's

    Only linear attention reads states.
    """

    token_ids: Array = field(metadata=shaped(TOKENS))
    positions: Array = field(metadata=shaped(TOKENS))
    slots: Array = field(metadata=shaped(TOKENS, padding=NOT_WRITTEN))
    segments: Array = field(metadata=shaped(SEGMENTS, 5))
    sample_rows: Array = field(metadata=shaped(ROWS))
    state_in: Array = field(metadata=shaped(SEGMENTS, padding=NO_STATE))
    state_out: Array = field(metadata=shaped(SEGMENTS, padding=NO_STATE))


PACKED = inputs_of(PackedBatch)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch(PackedBatch["Tensor"]):
    """All inputs of one forward pass, int32 tensors on one device.

    block_table  [seats, blocks], the slot of each chunk of a seat's row
    """

    block_table: Tensor = field(metadata=shaped(SEATS, BLOCKS))

    @classmethod
    def of(cls, packed: PackedBatch[Tensor], **others: Tensor) -> Self:
        """The packed inputs, with others beside them or in their place."""
        inputs = {name: getattr(packed, name) for name in PACKED}
        return cls(**(inputs | others))

    def tensors(self) -> list[Tensor]:
        """All inputs in the order of the fields, in which compiled code takes them."""
        return [getattr(self, name) for name in INPUTS]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*map(function, self.tensors()))


INPUTS = inputs_of(ForwardBatch)

Forward: TypeAlias = "Callable[[ForwardBatch, int], Tensor]"
"""A forward pass: takes a batch and the handle of a pool (`plugins.torch_ops.register_pool`), and
returns logits [R, vocab] float32."""
