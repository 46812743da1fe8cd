"""The device memory from which a step reads its batch: fixed addresses, sizes from a short list,
one upload.

    | token ids | positions | slots | segments | sample rows | feeds | sharing | everything else |
     \\______________ one copy, to where the graphs read ______________________/ \\_ another one _/

Both copies are from pinned memory.

The first parts are the inputs of `PackedBatch`, in its order. Each begins at a multiple of 16
bytes, so kernels are compiled for one alignment.

Batches are padded to the next size of the list, so one captured graph serves them all: padded
tokens have no segment and write no KV, padded segments have no queries, padded rows are never read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...builder.forward_batch import (
    PACKED,
    SEGMENTS,
    TOKENS,
    Array,
    ForwardBatch,
    PackedBatch,
    inputs_of,
    shaped,
)
from .inputs import StepInputs
from .sampling_inputs import SamplingInputs

LARGEST_CAPTURED = 1024  # tokens
_ALIGNMENT = 16  # bytes; alignment of every array in the staging buffer
_ALIGNED_WORDS = _ALIGNMENT // 4
STAGED = 4  # buffers: more than steps in flight, so no step waits for one
_PARTIAL_SEGMENTS = 4  # segments of a seat in one step, besides whole chunks
# tokens; larger batches are padded to a multiple of it, so that not every size compiles kernels of
# its own
_WIDE_STEP = 64


class Shape(NamedTuple):
    """The shape of a padded batch. `generation`: every segment has at most one token, so attention
    uses its smallest tiles."""

    tokens: int
    segments: int
    rows: int
    generation: bool = False

    @property
    def words(self) -> int:
        """Of a batch in a buffer, int32."""
        return places(self)[-1].end


class Shapes:
    """The sizes that batches are padded to.

    Up to 256 tokens, a step's time is that of reading the weights, so padding costs only more
    graphs. Above, a multiple of 64 tokens adds at most a quarter.
    """

    def __init__(self, most_tokens: int, seats: int, chunk_tokens: int):
        self._seats = seats
        self._chunk_tokens = chunk_tokens
        sizes: list[int] = [
            1,
            2,
            4,
            8,
            *range(16, 257, 16),
            *range(256 + _WIDE_STEP, LARGEST_CAPTURED + 1, _WIDE_STEP),
        ]
        self._sizes = sizes[: bisect_left(sizes, most_tokens) + 1]
        self.most_tokens = self._padded(most_tokens)
        self.most_segments = self._segments(self.most_tokens)
        generated = [self._shape(size, True) for size in self._sizes if size <= self._padded(seats)]
        self.captured = (*generated, *(self._shape(size, False) for size in self._sizes))

    def of(self, tokens: int, rows: int, generation: bool = False) -> Shape:
        """Returns the shape of a batch. A batch with more rows than seats has a shape of its
        own."""
        shape = self._shape(self._padded(tokens), generation)
        return shape._replace(rows=max(shape.rows, rows))

    def _padded(self, tokens: int) -> int:
        if tokens <= self._sizes[-1]:
            return self._sizes[bisect_left(self._sizes, tokens)]
        return -(-tokens // _WIDE_STEP) * _WIDE_STEP

    def _shape(self, tokens: int, generation: bool) -> Shape:
        segments = tokens if generation else self._segments(tokens)
        return Shape(tokens, segments, min(tokens, self._seats), generation)

    def _segments(self, tokens: int) -> int:
        """The most segments that a batch of so many tokens can have.

        Every segment has a token. Of a seat's segments in one step, all but four are whole chunks
        between resident ones. The four are the remainder of the previous step, the rest of a tail,
        a segment that is scored from its middle on, and the last.
        """
        return min(tokens, _PARTIAL_SEGMENTS * self._seats + tokens // self._chunk_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StagedBatch(PackedBatch[Array]):
    """A padded batch, and what only the device needs. All int32.

    feeds    [T], for a negative token id: the seat whose last sample is the token
    sharing  [S, 2], an order of all segments; without sharing their own, and zeros
    """

    feeds: Array = field(metadata=shaped(TOKENS))
    sharing: Array = field(metadata=shaped(SEGMENTS, 2))


STAGED_INPUTS = inputs_of(StagedBatch)
PADDED = [(name, one.padding) for name, one in STAGED_INPUTS.items() if one.padding]


class Place(NamedTuple):
    """Where a part of a batch lies: words [first, end) of its buffer."""

    name: str
    first: int
    end: int
    shape: tuple[int, ...]


@lru_cache(maxsize=1024)
def places(shape: Shape) -> tuple[Place, ...]:
    """The parts of a `StagedBatch` of this shape, one after the other."""
    placed = []
    end = 0
    for name, one in STAGED_INPUTS.items():
        first = -(-end // _ALIGNED_WORDS) * _ALIGNED_WORDS
        own = one.shape(shape._asdict())
        end = first + prod(own)
        placed.append(Place(name, first, end, own))
    return tuple(placed)


def batch_views(words: Array, shape: Shape) -> StagedBatch[Array]:
    """The parts of `words` [shape.words] int32."""
    parts = {name: words[first:end].reshape(own) for name, first, end, own in places(shape)}
    return StagedBatch(**parts)


def forward_batch(
    staged: StagedBatch[Tensor], last_samples: Tensor, block_table: Tensor
) -> ForwardBatch:
    """The inputs of the forward pass, with the last samples [seats] int32 in the place of the
    tokens that are fed."""
    fed = last_samples.index_select(0, staged.feeds)
    token_ids = torch.where(staged.token_ids < 0, fed, staged.token_ids)
    return ForwardBatch.of(staged, token_ids=token_ids, block_table=block_table)


def lay_out(inputs: StepInputs, shape: Shape, words: np.ndarray) -> None:
    """Writes a batch, padded to `shape`, into `words` [shape.words] int32."""
    batch = batch_views(words, shape)
    words[:] = 0
    for name, padding in PADDED:
        getattr(batch, name)[:] = padding
    for name in PACKED:
        values = getattr(inputs, name)
        getattr(batch, name)[: len(values)] = values
    fed = inputs.generated
    batch.feeds[:fed] = inputs.segments[:fed, 4]
    batch.sharing[:, 0] = np.arange(shape.segments)
    if inputs.sharing is not None:
        batch.sharing[:fed] = inputs.sharing


def place_arrays(arrays: Sequence[np.ndarray], first: int) -> tuple[list[int], int]:
    """Returns the first byte of each array if they lie one after the other from byte `first` on,
    and the end of the last."""
    begins = []
    end = first
    for array in arrays:
        begins.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = begins[-1] + array.nbytes
    return begins, end


def sampling_arrays(sampling: SamplingInputs) -> list[np.ndarray]:
    """Every array that the sampler reads on its device."""
    parts = [
        sampling.draws,
        sampling.limited,
        sampling.filtered,
        sampling.penalties,
        sampling.biases,
        sampling.mask,
    ]
    arrays = [array for part in parts if part is not None for array in part]
    arrays += [array for start in sampling.starts for array in (start.prompt, start.reply)]
    if sampling.scores is not None:
        arrays += [sampling.scores.rows, sampling.scores.targets]
    return arrays


_TYPES = {
    np.dtype(one): torch.from_numpy(np.empty(0, one)).dtype
    for one in (np.int32, np.int64, np.float32, np.float64)
}
_LEAST_CELLS = 32  # of the block table, in a layout: most steps change fewer


class _Layout:
    """Where all that a step uploads besides its batch lies, the same on the host and on the device.

    `sizes`: what decides it. `words` int32, a multiple of 16 bytes.
    """

    def __init__(self, sizes: tuple[object, ...], cells: int, arrays: Sequence[np.ndarray]):
        """cells: the most changed cells of the block table. arrays: the seats of the samples, then
        what the sampler reads."""
        self.sizes = sizes
        # in torch's types for indices, so the device converts nothing
        seats = np.empty(len(arrays[0]), np.int64)
        parts: list[np.ndarray] = [
            np.empty(cells, np.int64),
            np.empty(cells, np.int32),
            seats,
            *arrays[1:],
        ]
        begins, end = place_arrays(parts, 0)
        self.words = -(-end // _ALIGNMENT) * _ALIGNED_WORDS
        self.shapes = [part.shape for part in parts]
        self.places = [
            (part.dtype, slice(begin // part.itemsize, begin // part.itemsize + part.size))
            for begin, part in zip(begins, parts, strict=True)
        ]

    def write(self, words: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Writes the arrays, cells and slots first, into `words` [self.words] int32."""
        views = {one: words.view(one) for one in _TYPES}
        for (dtype, place), array in zip(self.places, arrays, strict=True):
            views[dtype][place][: array.size] = array.ravel()


class Staging:
    """Pinned buffers that are written in turn, each only after the device has finished the work
    that reads it."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(STAGED)]
        self._passed: list[torch.cuda.Event | None] = [None] * STAGED
        self._turn = 0

    def take(self, words: int) -> Tensor:
        """Returns a buffer of `words` words, int32. The next issued work may read it; `issued`
        releases it."""
        self._turn = (self._turn + 1) % STAGED
        if (event := self._passed[self._turn]) is not None and not event.query():
            event.synchronize()
        if len(self._buffers[self._turn]) < words:
            self._buffers[self._turn] = torch.empty(
                2 * words, dtype=torch.int32, pin_memory=self._pinned
            )
        return self._buffers[self._turn][:words]

    def issued(self) -> None:
        """Marks the end of the work that uses the last taken buffer: later work on the current
        stream does not use it."""
        if self._pinned:
            event = self._passed[self._turn] = self._passed[self._turn] or torch.cuda.Event()
            event.record()


class StepBuffers:
    """Holds one batch at a time, on `device`. All work is on the current stream, in its order."""

    def __init__(self, shapes: Shapes, device: torch.device | str):
        self._shapes = shapes
        self._device = torch.device(device)
        self._copy: Callable[[Tensor, Tensor], object] = Tensor.copy_
        if self._device.type == "cuda":
            # imported here because only CUDA installations have Triton
            from ...plugins.kv_forms.host_copy_kernel import copy_words

            self._copy = copy_words
        self._staging = Staging(self._device.type == "cuda")
        largest = shapes.of(shapes.most_tokens, shapes.most_tokens)
        self._words = torch.zeros(largest.words, dtype=torch.int32, device=device)
        self._others = torch.empty(0, dtype=torch.int32, device=device)
        self._typed: dict[np.dtype[Any], Tensor] = {}  # the same words in each type
        self._layout: _Layout | None = None
        self._views: list[Tensor] = []  # of the layout, on the device
        self._placed: dict[int, Tensor] = {}

    def batch(self, shape: Shape) -> StagedBatch[Tensor]:
        """The buffers of a batch of this shape; always at the same addresses."""
        return batch_views(self._words[: shape.words], shape)

    def idle(self, shape: Shape) -> StagedBatch[Tensor]:
        """A batch that writes nothing and attends to nothing."""
        batch = self.batch(shape)
        self._words.zero_()
        for name, padding in PADDED:
            getattr(batch, name).fill_(padding)
        return batch

    def upload(self, inputs: StepInputs) -> Shape:
        """Copies the whole batch to the device, asynchronously."""
        tokens = len(inputs.token_ids)
        shape = self._shapes.of(
            tokens, len(inputs.sample_rows), generation=inputs.generated == tokens
        )
        sampling = sampling_arrays(inputs.sampling)
        arrays = [inputs.sample_seats, *sampling]
        cells = inputs.block_cells
        layout = self._lay_out_others(len(cells), arrays)
        first = -(-shape.words // _ALIGNED_WORDS) * _ALIGNED_WORDS
        staging = self._staging.take(first + layout.words)
        words = staging.numpy()
        lay_out(inputs, shape, words[: shape.words])
        layout.write(words[first:], [cells, inputs.block_slots, *arrays])
        self._copy(self._words[: shape.words], staging[: shape.words])
        self._copy(self._others[: layout.words], staging[first:])
        self._staging.issued()
        placed_cells, placed_slots, self.sample_seats, *placed = self._views
        self.block_cells = placed_cells[: len(cells)]
        self.block_slots = placed_slots[: len(cells)]
        self._placed = {id(array): tensor for array, tensor in zip(sampling, placed, strict=True)}
        return shape

    def _lay_out_others(self, changed: int, arrays: Sequence[np.ndarray]) -> _Layout:
        """Returns the last step's layout if all sizes are equal, else a new one. `changed` cells of
        the block table, whose number differs in nearly each step, have room for more."""
        cells = max(_LEAST_CELLS, 1 << (changed - 1).bit_length())
        sizes = cells, [(array.dtype, array.shape) for array in arrays]
        if self._layout is not None and self._layout.sizes == sizes:
            return self._layout
        self._layout = layout = _Layout(sizes, cells, arrays)
        if layout.words > len(self._others):
            self._others = self._others.new_empty(2 * layout.words)
            self._typed = {one: self._others.view(of) for one, of in _TYPES.items()}
        self._views = [
            self._typed[dtype][place] if len(shape) == 1 else self._typed[dtype][place].view(shape)
            for (dtype, place), shape in zip(layout.places, layout.shapes, strict=True)
        ]
        return layout

    def place(self, array: np.ndarray) -> Tensor:
        """Returns an array of the last uploaded batch's sampling inputs, on the device."""
        return self._placed[id(array)]
