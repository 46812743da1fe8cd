"""The interface between a device and the executor. `cpu.py` and `cuda.py` implement it.

**Lanes.** Work is put on one of three lanes (COMPUTE, IN, OUT). Each lane does its work in the
order of issue; only `wait` orders work on different lanes. On CUDA a lane is a stream (two if
copies change their form) and a ticket an event. All methods except `record` are called by one
thread, and only `allocate_pool`, `load`, `watch`, `synchronize` and `close` may block it.

**Gates.** A gate stands before the first use of a layer's KV in a step. `run` binds each gate to
the last `mark(..., gate=...)` issued *before* that `run`: a later mark holds the next step, not
this one. A gate never marked is open.

**Failure.** Work that raises ends the device: from then on every method that issues or waits raises
that exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...builder.forward_batch import ForwardBatch
from ...builder.manifest import Manifest
from ...plugins.kv_forms.forms import Form
from ...plugins.state.pool import StateShape
from ...scheduler.plan import Lane
from ...scheduler.types import Tier
from ..counters import NO_WAITS, Waits
from ..step.inputs import StepInputs
from ..step.sampler import Scores


class Memory(NamedTuple):
    """Bytes: the memory that a pool may take now, and all memory."""

    free: int
    total: int


class TransferSeconds(NamedTuple):
    """Seconds since the start, by direction: the link's time, the part that steps waited for, and
    waits before copies began."""

    swap_in: float = 0.0
    swap_out: float = 0.0
    exposed: float = 0.0
    queued_in: Waits = NO_WAITS
    queued_out: Waits = NO_WAITS


class Work(NamedTuple):
    """Completed work of a lane: a copy of `size` bytes, or a forward pass of `size` tokens, and its
    waits for gates.

    start, end      seconds of `time.perf_counter`
    """

    lane: Lane
    start: float
    end: float
    size: int


class Ticket:
    """A point in a lane's order, complete once all work issued before it on that lane is complete.
    Only its device reads it."""

    __slots__ = ()


class ForwardPass(Protocol):
    """The parts of an engine that a device uses."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of the pools: `dtype`, or `fp8_pool.DTYPE` for KV in eight bits."""
    vocab_size: int
    manifest: Manifest
    """The engine's manifest; a GPU's attention is laid out for its query heads."""

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        """(slots, layers, 2, kv_heads, chunk_tokens, head_dim), or head_dim + 1 in eight bits
        (`fp8_pool`)."""

    def forward(self, batch: ForwardBatch, pool: int) -> torch.Tensor:
        """Returns logits [R, vocab] float32 of the batch's rows `sample_rows`.

        pool: handle of the GPU pool; its gate is called with each layer before that layer's KV is
        used.
        """


class Device(Protocol):
    """One rank's pools, lanes and engine. Its work is issued by one thread and runs behind it."""

    def memory(self, tier: Tier) -> Memory:
        """Returns the memory of GPU or HOST."""

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        """Makes the tier's KV pool, `shape` as in `ForwardPass.kv_shape`, zeroed; once for each
        tier, kept until `close`.

        The GPU's pool comes first. HOST's records are like the GPU's, or of `form`: then `copy`
        encodes and decodes. From `load` on HOST grows towards `most` slots in the background, if
        they are more, as long as there is memory.

        SettingError names the setting to lower if the pool does not fit.
        """

    @property
    def host_slots(self) -> int:
        """Slots of the HOST pool that can be used now. They never become fewer."""

    def record(self, slot: int) -> np.ndarray:
        """Returns the record in a HOST slot, [bytes] uint8: the memory itself, not a copy.

        For the disk, whose threads may call this too. The caller ensures that no copy uses the
        record at the same time.
        """

    def keep_states(self, slots: int, shape: StateShape) -> None:
        """The last chunks of the GPU's pool hold states of linear attention, `state_chunks` each;
        called after the pool is made and before `load`.

        SettingError if this device has no operations for them.
        """

    def load(
        self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int
    ) -> None:
        """Takes the engine, after the pools are made, and makes the state of the seats.

        seats, blocks   shape of the block table, which lives here with each seat's last sample
        gates           layers that have a gate, ascending: the first of each layer group
        most_tokens     the most tokens of a batch
        """

    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        """Copies `layers` of the chunks in slots `sources` to slots `targets` ([n] int32 each, all
        distinct).

        IN copies from the HOST pool to the GPU pool, OUT the other way. With all layers, whole
        records are copied. The caller must not use the arrays afterwards.
        """

    def mark(self, lane: Lane, gate: int | None = None) -> Ticket:
        """Returns a ticket for all work on the lane so far. With `gate`, a layer, that layer's gate
        opens there too."""

    # `ticket`: of the same device, which has its own ticket type.

    def wait(self, lane: Lane, ticket: Any) -> None:
        """Work issued on the lane from now on begins after the ticket is complete. The caller does
        not wait."""

    def ready(self, ticket: Any) -> bool:
        """Whether the ticket is complete."""

    def synchronize(self, ticket: Any) -> None:
        """Returns once the ticket is complete: the caller waits."""

    def upload(self, inputs: StepInputs) -> None:
        """Applies the changes of block table and penalty counts, and makes this the batch of the
        next `run` and `sample`, in COMPUTE's order.

        The caller must not change the arrays afterwards.
        """

    def run(self) -> None:
        """Runs the forward pass of the last uploaded batch, on COMPUTE. Binds the gates (see
        above)."""

    def sample(self) -> tuple[Ticket, np.ndarray, Scores | None]:
        """Draws a token for each sampled row of the last run; they become their seats' last
        samples.

        Returns a ticket, the tokens [R] int32, and the scores if the batch asks for any, all in
        host memory, valid once the ticket is complete and until three more calls of `sample`.
        """

    def transfer_seconds(self) -> TransferSeconds:
        """Times of complete copies, and of steps that waited for them. Never waits."""

    def watch(self, report: Callable[[Work], None]) -> None:
        """From now on calls `report` with each copy and forward pass, on any thread, in the order
        of each lane.

        The call comes at the latest with the first `transfer_seconds`, or `close`, after the work
        is complete.
        """

    def close(self, host_in_use: bool = False) -> None:
        """Waits for work in flight, then frees memory and ends threads. Idempotent; does not raise
        errors of failed work. host_in_use: others still use `record`'s memory, so that is left to
        the end of the process."""
