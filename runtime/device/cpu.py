"""The device protocol on host memory: one daemon thread for each lane, so copies and steps overlap
as on a GPU.

Tests change the timing within the limits of the protocol: they delay work and shuffle the pairs of
a copy. Code that passes them is correct on any device.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch

from ...builder.forward_batch import PACKED, ForwardBatch
from ...plugins.attention.cpu import StepPlans
from ...plugins.kv_forms.forms import Form, record_bytes
from ...plugins.state.pool import StatePool, StateShape
from ...plugins.torch_ops import register_pool, release_pool
from ...scheduler.plan import Lane
from ...scheduler.types import InvariantError, SettingError, Tier
from ..counters import NO_WAITS, Waits
from ..openmp import SharedProcessors, compute_alone, end_team, idle_teams
from ..step.inputs import StepInputs
from ..step.sampler import Scores, make_sampler
from .memory import GIB, POOL_SETTINGS, check_pool_fits, host_memory
from .protocol import ForwardPass, Memory, Ticket, TransferSeconds, Work


class CpuTicket(Ticket):
    """The `number`-th mark of its lane."""

    __slots__ = ("lane", "number")

    def __init__(self, lane: Lane, number: int):
        self.lane = lane
        self.number = number


class CpuDevice:
    """Both pools in host memory. Each lane's thread does its work in order; a device-side wait
    blocks that thread."""

    def __init__(
        self, disturb: Callable[[Lane], float] | None = None, shuffle: random.Random | None = None
    ):
        """disturb: seconds to sleep before each piece of work of a lane; shuffle: mixes the pairs
        of each copy."""
        self._disturb = disturb
        self._shuffle = shuffle
        self._pools: dict[Tier, torch.Tensor] = {}
        self._states: StatePool | None = None
        self._form: Form | None = None
        self._handle: int | None = None
        self._gates: dict[int, CpuTicket] = {}
        self._processors = SharedProcessors(idle_teams())
        self._closed = False
        self._report: Callable[[Work], None] | None = None
        # Each is written by one lane's thread: the copy times of IN and OUT, the time that COMPUTE
        # waited for them, and the waits of IN's and OUT's copies before they began.
        self._seconds = dict.fromkeys(Lane, 0.0)
        self._queued = {Lane.IN: NO_WAITS, Lane.OUT: NO_WAITS}

        # The lanes' common state, used only while the condition is held. `_error` is set once and
        # ends all lanes.
        self._changed = threading.Condition()
        self._completed = dict.fromkeys(Lane, 0)
        self._error: BaseException | None = None

        self._marked = dict.fromkeys(Lane, 0)
        self._queues: dict[Lane, SimpleQueue[Callable[[], None] | None]] = {
            lane: SimpleQueue() for lane in Lane
        }
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"lane {lane.name}", daemon=True)
            for lane in Lane
        ]
        for thread in self._threads:
            thread.start()

    # The lanes.

    def _work(self, lane: Lane) -> None:
        queue = self._queues[lane]
        if lane is not Lane.COMPUTE:
            compute_alone()
        with torch.inference_mode():
            while (task := queue.get()) is not None:
                if self._error is not None:
                    # a ticket after failed work never completes; waiting for it raises the error
                    continue
                try:
                    task()
                except BaseException as error:  # carried to the issuing thread, which raises it
                    self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _issue(self, lane: Lane, task: Callable[[], None]) -> None:
        if self._closed:
            raise InvariantError("the device is closed")
        if self._error is not None:
            raise self._error
        self._queues[lane].put(task)

    def _issue_work(self, lane: Lane, task: Callable[[], None]) -> None:
        """Issues like `_issue`, but the lane may sleep first."""
        delay = self._disturb(lane) if self._disturb else 0.0

        def delayed() -> None:
            time.sleep(delay)
            task()

        self._issue(lane, delayed if delay else task)

    # Tickets.

    def mark(self, lane: Lane, gate: int | None = None) -> CpuTicket:
        self._marked[lane] += 1
        ticket = CpuTicket(lane, self._marked[lane])

        def complete() -> None:
            with self._changed:
                self._completed[lane] = ticket.number
                self._changed.notify_all()

        self._issue(lane, complete)
        if gate is not None:
            self._gates[gate] = ticket
        return ticket

    def wait(self, lane: Lane, ticket: CpuTicket) -> None:
        self._issue(lane, lambda: self._await(lane, ticket))

    def _await(self, lane: Lane, ticket: CpuTicket) -> None:
        """Waits on the lane's thread. Only COMPUTE's waits are counted: copies that wait for each
        other delay nothing."""
        started = time.perf_counter()
        self.synchronize(ticket)
        if lane is Lane.COMPUTE:
            self._seconds[lane] += time.perf_counter() - started

    def ready(self, ticket: CpuTicket) -> bool:
        if ticket.number <= self._completed[ticket.lane]:
            return True
        if self._error is not None:
            raise self._error
        return False

    def synchronize(self, ticket: CpuTicket) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ready(ticket))

    # Memory and copies.

    def memory(self, tier: Tier) -> Memory:
        """The tiers share the host's memory."""
        return host_memory()

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        shape = max(shape[0], most), *shape[1:]
        # numpy's zeroed pages are not allocated before they are written, so the existing pools
        # still count as free.
        free = self.memory(tier).free - sum(pool.nbytes for pool in self._pools.values())
        record = record_bytes(shape, dtype, form)
        check_pool_fits(POOL_SETTINGS[tier], shape[0], shape[0] * record, free)
        try:
            if form is not None:
                self._form = form
                self._pools[tier] = torch.from_numpy(
                    np.zeros((shape[0], shape[1], record // shape[1]), np.uint8)
                )
            else:
                self._pools[tier] = torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(
                    dtype
                )
        except MemoryError as error:  # raised under a limit of this process (ulimit -v)
            message = (
                f"{shape[0]} chunks could not be had though {free / GIB:.2f} GiB seemed free; "
                f"lower it ({error})"
            )
            raise SettingError(POOL_SETTINGS[tier], message) from error

    @property
    def host_slots(self) -> int:
        return len(self._pools[Tier.HOST])

    def record(self, slot: int) -> np.ndarray:
        return self._pools[Tier.HOST][slot].view(-1).view(torch.uint8).numpy()

    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        host, gpu = self._pools[Tier.HOST], self._pools[Tier.GPU]
        source_pool, target_pool = (host, gpu) if lane is Lane.IN else (gpu, host)
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        if self._shuffle:
            self._shuffle.shuffle(pairs)

        delay = self._disturb(lane) if self._disturb else 0.0
        recoded = self._recoding(lane)
        issued = time.perf_counter()

        def task() -> None:
            started = time.perf_counter()
            before = self._queued[lane]
            self._queued[lane] = Waits(before.seconds + started - issued, before.copies + 1)
            time.sleep(delay)
            for source, target in pairs:
                moved = recoded(source_pool[source : source + 1, layers.start : layers.stop])
                target_pool[target, layers.start : layers.stop].copy_(moved[0])
            ended = time.perf_counter()
            self._seconds[lane] += ended - started
            if self._report is not None:
                self._report(
                    Work(
                        lane,
                        started,
                        ended,
                        len(pairs) * host[0, layers.start : layers.stop].nbytes,
                    )
                )

        self._issue(lane, task)

    def _recoding(self, lane: Lane) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the function that converts layers of chunks from the source tier's form to the
        target tier's."""
        form = self._form
        gpu = self._pools[Tier.GPU]
        if form is None:
            return lambda layers: layers
        return (
            form.encode
            if lane is Lane.OUT
            else lambda layers: form.decode(layers, gpu.shape, gpu.dtype)
        )

    # The step.

    def keep_states(self, slots: int, shape: StateShape) -> None:
        self._states = StatePool.behind_kv(self._pools[Tier.GPU], slots, shape)

    def load(
        self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int
    ) -> None:
        end_team()  # of the thread that loaded the engine
        self._engine = engine
        self._plans = StepPlans()
        self._handle = register_pool(
            self._pools[Tier.GPU], self._pass_gate, plans=self._plans, states=self._states
        )
        self._block_table = torch.zeros(seats, blocks, dtype=torch.int32)
        self._last_samples = torch.zeros(seats, dtype=torch.int32)
        self._sampler = make_sampler(engine.vocab_size)

    def upload(self, inputs: StepInputs) -> None:
        self._uploaded = inputs

        def task() -> None:
            self._inputs = inputs
            self._sampler.start(inputs.sampling.starts)
            cells, slots = (
                torch.from_numpy(inputs.block_cells),
                torch.from_numpy(inputs.block_slots),
            )
            self._block_table.view(-1)[cells] = slots

        self._issue_work(Lane.COMPUTE, task)

    def run(self) -> None:
        bound = dict(self._gates)

        def task() -> None:
            started = time.perf_counter()
            self._bound_gates = bound
            inputs = self._inputs
            packed = {name: torch.from_numpy(getattr(inputs, name)) for name in PACKED}
            token_ids = packed["token_ids"] = packed["token_ids"].clone()
            seats = packed["segments"][: inputs.generated, 4]
            token_ids[: inputs.generated] = self._last_samples[seats]
            batch = ForwardBatch(**packed, block_table=self._block_table)
            assert self._handle is not None
            try:
                self._logits = self._engine.forward(batch, self._handle)
            finally:
                self._plans.clear()  # they are of this step, and large for long prompts
            if self._report is not None:
                self._report(Work(Lane.COMPUTE, started, time.perf_counter(), len(token_ids)))

        self._issue_work(Lane.COMPUTE, task)

    def _pass_gate(self, layer: int) -> None:
        """Called by the engine before each layer, on COMPUTE's thread."""
        self._processors.look(time.perf_counter())
        if (ticket := self._bound_gates.get(layer)) is not None:
            self._await(Lane.COMPUTE, ticket)

    def sample(self) -> tuple[CpuTicket, np.ndarray, Scores | None]:
        tokens = np.empty(len(self._uploaded.sample_seats), np.int32)
        wanted = self._uploaded.sampling.scores
        scores = wanted and Scores.empty(len(wanted.tops), wanted.width)

        def task() -> None:
            drawn, scored = self._sampler.sample(self._logits, self._inputs.sampling)
            self._last_samples[torch.from_numpy(self._inputs.sample_seats)] = drawn.int()
            tokens[:] = drawn.numpy()
            if scores is not None and scored is not None:
                for target, source in zip(scores, scored, strict=True):
                    target.copy_(source)

        self._issue_work(Lane.COMPUTE, task)
        return self.mark(Lane.COMPUTE), tokens, scores

    def transfer_seconds(self) -> TransferSeconds:
        seconds, queued = self._seconds, self._queued
        return TransferSeconds(
            seconds[Lane.IN],
            seconds[Lane.OUT],
            seconds[Lane.COMPUTE],
            queued[Lane.IN],
            queued[Lane.OUT],
        )

    def watch(self, report: Callable[[Work], None]) -> None:
        self._report = report

    def close(self, host_in_use: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._processors.close()
        if self._handle is not None:
            release_pool(self._handle)
        self._pools.clear()
