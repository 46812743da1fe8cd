"""Does what plans say: one step after the other, the next one launched while the last one runs.

Nothing here decides and nothing waits but `wait`; what must come before what is in the plan's tickets and in the order
of issue on the device's lanes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import Lane, StepPlan, StepResult
from ..scheduler.types import InvariantError, RowId, Tier
from .device import Device, ForwardPass, Ticket
from .messages import KVCounters
from .step_inputs import StepPacker
from .transfer import Transfers

MAX_IN_FLIGHT = 3
"""Steps launched and not waited for. Two keep the device busy; `Device.sample` holds the tokens of three."""

GROUP_LAYERS = 8
"""Layers of a gated swap-in that share a gate: as pieces of 8 layers, copies keep 50 of 54 GB/s (DESIGN section 5)."""

_NO_TOKENS = np.empty(0, np.int32)


class _Launched(NamedTuple):
    step: int
    samples: tuple[RowId, ...]
    tokens: np.ndarray
    tickets: list[Ticket]


class Executor:
    """One rank's device, with its KV pools in GPU and HOST memory, obeying one plan after the other.

    One thread calls it. What fails on the device is raised by the next `launch` or `wait`; after that only `close`
    makes sense.
    """

    def __init__(self, device: Device, engine: ForwardPass, config: SchedulerConfig, group_layers: int = GROUP_LAYERS):
        """Takes the device over and closes it in `close`. SettingError if a pool does not fit its memory."""
        shape = engine.kv_shape(config.gpu_kv_chunks, config.chunk_tokens)
        # A row may overrun its last position by the steps in flight; their KV is never used.
        blocks = config.chunks(config.max_model_len + MAX_IN_FLIGHT)
        chunk_bytes = int(np.prod(shape[1:])) * engine.dtype.itemsize
        self._device = device
        self._inputs = StepPacker(config.max_num_seqs, blocks, config.chunk_tokens)
        self._transfers = Transfers(device, shape[1], group_layers, chunk_bytes)
        self._launched: deque[_Launched] = deque()
        device.allocate_pool(Tier.GPU, shape, engine.dtype)
        device.allocate_pool(Tier.HOST, engine.kv_shape(config.host_kv_chunks, config.chunk_tokens), engine.dtype)
        device.load(engine, config.max_num_seqs, blocks, self._transfers.gates)

    def launch(self, plan: StepPlan) -> None:
        """Issues the plan's work and returns. InvariantError if the plan contradicts itself or too many are in flight.

        A plan without tokens computes nothing; it is complete when its copies are.
        """
        if len(self._launched) == MAX_IN_FLIGHT:
            raise InvariantError(f"step {plan.step} launched with {MAX_IN_FLIGHT} steps in flight")
        self._device.upload(self._inputs.pack(plan))
        tickets = self._transfers.issue(plan)
        tokens = _NO_TOKENS
        if plan.tokens:
            self._transfers.hold_step(plan)
            self._device.run()
            ticket, tokens = self._device.sample()
            tickets = [ticket]
        else:
            ticket = self._device.mark(Lane.COMPUTE)
            tickets.append(ticket)
        self._transfers.launched(plan.step, ticket)
        self._launched.append(_Launched(plan.step, plan.samples, tokens, tickets))

    def wait(self) -> StepResult:
        """Waits for the oldest launched plan and takes its result. InvariantError if there is none."""
        if not self._launched:
            raise InvariantError("no step is in flight")
        step, samples, tokens, tickets = self._launched.popleft()
        for ticket in tickets:
            self._device.synchronize(ticket)
        return StepResult(step, samples, tuple(tokens.tolist()), self._transfers.completed())

    @property
    def copied_bytes(self) -> KVCounters:
        """Bytes of KV copied so far, by direction."""
        return self._transfers.copied_bytes

    def close(self) -> None:
        """Ends the device and frees the pools; work in flight is finished first. Idempotent."""
        self._device.close()
