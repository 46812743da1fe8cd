"""What a device does for the executor, in a good dozen methods: `cpu_device` is one, a CUDA device another.

**Lanes.** Work is put on one of three lanes (COMPUTE, IN, OUT) and each lane does its own in the order of issue;
nothing else orders lanes but `wait`. On CUDA a lane is a stream (two where copies change their form) and a ticket an
event. All methods but `record` are called by one thread, and only `allocate_pool`, `load`, `watch`, `synchronize` and
`close` may block it.

**Gates.** A gate stands before the first use of a layer's KV in a step. `run` binds each gate to the last
`mark(..., gate=...)` issued *before* that `run`: a mark that comes later holds the next step, not this one. A gate
never marked is open.

**Failure.** Work that raises ends the device: from then on every method that issues or waits raises that exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...builder.manifest import Manifest
from ...plugins.kv_forms.forms import Form
from ...scheduler.plan import Lane
from ...scheduler.types import Tier
from ..counters import NO_WAITS, Waits
from ..step.inputs import StepInputs
from ..step.sampler import Scores


class Memory(NamedTuple):
    """Bytes: what a pool may take now, and what there is at all."""

    free: int
    total: int


class TransferSeconds(NamedTuple):
    """Seconds since the start, by direction: the link's time, what of it steps waited for, waits to begin."""

    swap_in: float = 0.0
    swap_out: float = 0.0
    exposed: float = 0.0
    queued_in: Waits = NO_WAITS
    queued_out: Waits = NO_WAITS


class Work(NamedTuple):
    """What a lane has done: a copy of `size` bytes, or a forward pass of `size` tokens, and its waits for gates.

    start, end      seconds of `time.perf_counter`
    """

    lane: Lane
    start: float
    end: float
    size: int


class Ticket:
    """A point in a lane's order, complete once all work issued before it on that lane is. Only its device reads it."""

    __slots__ = ()


class ForwardPass(Protocol):
    """The engine as a device sees it."""

    dtype: torch.dtype
    vocab_size: int
    manifest: Manifest
    """What the engine was built from; a GPU's attention is laid out for its query heads."""

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        """(slots, layers, 2, kv_heads, chunk_tokens, head_dim)."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        segments: torch.Tensor,
        block_table: torch.Tensor,
        sample_rows: torch.Tensor,
        pool: int,
    ) -> torch.Tensor:
        """Logits [R, vocab] float32 of the rows `sample_rows` of a batch laid out as `StepInputs` says.

        token_ids, positions, slots [T], segments [S, 5], block_table [seats, blocks], sample_rows [R], all int32.
        pool: handle of the GPU pool, whose gate is called with each layer before that layer's KV is touched.
        """


class Device(Protocol):
    def memory(self, tier: Tier) -> Memory:
        """Memory of GPU or HOST."""

    def allocate_pool(self, tier: Tier, shape: tuple[int, ...], dtype: torch.dtype, form: Form | None = None) -> None:
        """Makes the tier's KV pool, `shape` as `ForwardPass.kv_shape`, zeroed; once a tier, kept until `close`.

        The GPU's comes first. HOST's records are as its, or of a form: then `copy` encodes and decodes.

        SettingError names the setting to lower if the pool does not fit.
        """

    def record(self, slot: int) -> np.ndarray:
        """The record in a HOST slot, [bytes] uint8: the memory itself, not a copy.

        For the disk, whose threads may call this too. Whoever reads or writes it sees to it that no copy does.
        """

    def load(self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int) -> None:
        """Takes the engine to be run, after the pools are made, and makes the state of the seats.

        seats, blocks   shape of the block table, which lives here beside each seat's last sample
        gates           layers that have a gate, ascending: the first of each layer group
        most_tokens     of a batch
        """

    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        """Copies `layers` of the chunks in slots `sources` to slots `targets` ([n] int32 each, all distinct).

        IN copies from the HOST pool to the GPU pool, OUT the other way. With all layers whole records move. The
        arrays belong to the device from here on.
        """

    def mark(self, lane: Lane, gate: int | None = None) -> Ticket:
        """A ticket for all work on the lane so far. With `gate`, a layer, that layer's gate opens there too."""

    # `ticket`: one of the same device, which has a type of its own.

    def wait(self, lane: Lane, ticket: Any) -> None:
        """What is issued on the lane from here on begins after the ticket is complete. The caller does not wait."""

    def ready(self, ticket: Any) -> bool:
        """Whether the ticket is complete."""

    def synchronize(self, ticket: Any) -> None:
        """Returns once the ticket is complete: the caller waits."""

    def upload(self, inputs: StepInputs) -> None:
        """Applies the changes of block table and penalty counts, and makes the batch the one that `run` and `sample`
        take, in COMPUTE's order.

        The arrays belong to the device from here on, and nobody writes to them again.
        """

    def run(self) -> None:
        """The forward pass of the last uploaded batch, on COMPUTE. Binds the gates (see above)."""

    def sample(self) -> tuple[Ticket, np.ndarray, Scores | None]:
        """Draws a token for each sampled row of the last run; they become their seats' last samples.

        Returns a ticket, the tokens [R] int32, and the scores if the batch asks for any, all in host memory, valid once
        the ticket is complete and until three more calls of `sample`.
        """

    def transfer_seconds(self) -> TransferSeconds:
        """Of copies that are complete, and of steps behind them. Never waits."""

    def watch(self, report: Callable[[Work], None]) -> None:
        """From here on tells `report` of each copy and forward pass, on whatever thread, in the order of each lane.

        At the latest with the first `transfer_seconds`, or `close`, after it is complete.
        """

    def close(self) -> None:
        """Waits for work in flight and gives memory and threads back. Idempotent; raises nothing of failed work."""
