"""The device protocol on an NVIDIA GPU: a lane is a stream (two if copies change their form:
`compressed_copies`), a ticket is an event, and the HOST pool is page-locked memory.

The calling thread hands copies to the driver, a thousand in a call; a call takes 0.35 ms and lets
other threads run. The same thread issues a step's copies, records its gates and launches it, in
this order, so no step is launched before its gates are recorded. A separate thread for copies would
be faster, but this order would then need a proof.

A gate is one event for the device's life. A running step waits for the event's last record before
the launch, inside a captured graph too (an external wait). So one graph serves consecutive steps in
flight.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...builder.checkpoints.config import Shard
from ...builder.progress import show_progress
from ...plugins.kv_forms.forms import Form, record_bytes
from ...plugins.state.pool import StatePool, StateShape
from ...plugins.torch_ops import register_pool, release_pool
from ...scheduler.plan import Lane
from ...scheduler.types import InvariantError, SettingError, Tier
from ..step.buffers import Shape, Shapes, Staging, StepBuffers, forward_batch
from ..step.inputs import StepInputs
from ..step.sampler import Scores, make_sampler
from ..system import give_up_after
from .compressed_copies import CodedCopies
from .cuda_api import CudaError, CudaRuntime, check_gpu
from .cuda_graphs import StepGraphs
from .memory import GIB, POOL_SETTINGS, check_pool_fits, host_memory
from .pinned_memory import PinnedPool, Records
from .protocol import ForwardPass, Memory, Ticket, TransferSeconds, Work
from .timing import TransferTimes

OVERDUE_SECONDS = 60.0
"""Seconds. No copy and no step takes nearly so long: the device hangs, and further waiting would
hide the place."""

CAPTURE_SECONDS = 600.0
"""Seconds. On a machine's first start this includes the compilation of every kernel."""

POLL_SECONDS = 30e-6


class CudaTicket(Ticket):
    """`what`: a description of the last work issued before it."""

    __slots__ = ("event", "lane", "what")

    def __init__(self, lane: Lane, what: str):
        self.lane = lane
        self.what = what
        self.event = torch.cuda.Event(enable_timing=True)


def _ends_the_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """After the method has raised, every later call of any method raises the same."""

    @functools.wraps(method)
    def guarded(self: CudaDevice, *arguments: Any, **named: Any) -> Any:
        if self._closed:
            raise InvariantError("the device is closed")
        if self._error is not None:
            raise self._error
        try:
            return method(self, *arguments, **named)
        except BaseException as error:
            self._error = error
            raise

    return guarded


class CudaDevice:
    """The current CUDA device of torch."""

    def __init__(self, enforce_eager: bool = False, batched_copies: bool = True):
        """enforce_eager: run the same steps without graphs; batched_copies: False issues copies one
        by one (for tests).

        SettingError if there is no suitable GPU.
        """
        check_gpu()
        self._runtime = CudaRuntime()
        self._runtime.use_device(torch.cuda.current_device())
        self._copy = self._runtime.copy_batch if batched_copies else self._runtime.copy_each
        self._enforce_eager = enforce_eager
        self._streams = {lane: torch.cuda.Stream() for lane in Lane}
        self._compute = self._streams[Lane.COMPUTE]
        new_event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._times = TransferTimes(new_event, self._streams, idle=torch.cuda.Stream())
        self._issued = dict.fromkeys(Lane, "its start")
        self._last: dict[Lane, CudaTicket] = {}
        self._gates: dict[int, torch.cuda.Event] = {}
        self._graphs = StepGraphs(self._compute)
        self._records: dict[Tier, Records] = {}
        self._coded: dict[Lane, CodedCopies] = {}
        self._host: PinnedPool | None = None
        self._pool: Tensor | None = None
        self._states: StatePool | None = None
        self._handle: int | None = None
        self._error: BaseException | None = None
        self._closed = False

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._compute), torch.inference_mode():
            yield

    # Memory and copies.

    def memory(self, tier: Tier) -> Memory:
        if tier is Tier.HOST:
            return host_memory()
        free, total = torch.cuda.mem_get_info()
        return Memory(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total)

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        slots = shape[0]
        record = record_bytes(shape, dtype, form)
        free = self.memory(tier).free
        check_pool_fits(POOL_SETTINGS[tier], slots, slots * record, free)
        try:
            if tier is Tier.GPU:
                self._pool = torch.zeros(shape, dtype=dtype, device="cuda")
                first = np.array([self._pool.data_ptr()], np.uint64)
                self._records[tier] = Records(first, slots, slots, record)
            else:
                self._host = PinnedPool(self._runtime, slots, record, most)
                self._records[tier] = self._host.records
        except (torch.cuda.OutOfMemoryError, CudaError) as error:
            raise SettingError(
                POOL_SETTINGS[tier],
                f"{slots} chunks need {slots * record / GIB:.2f} GiB, which could not be had "
                "though "
                f"{free / GIB:.2f} GiB seemed free; lower it ({error})",
            ) from error
        self._layers = shape[1]
        if form is not None:
            assert self._pool is not None and self._host is not None
            self._coded = {
                lane: CodedCopies(
                    lane, form, self._pool, self._host.records, self._streams[lane], self._copy
                )
                for lane in (Lane.IN, Lane.OUT)
            }

    @property
    def host_slots(self) -> int:
        return self._records[Tier.HOST].slots

    def record(self, slot: int) -> np.ndarray:
        assert self._host is not None
        return self._host.record(slot)

    @_ends_the_device
    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        if not len(sources):
            return
        host, gpu = self._records[Tier.HOST], self._records[Tier.GPU]
        source, target = (host, gpu) if lane is Lane.IN else (gpu, host)
        self._issued[lane] = (
            f"the copy of layers {layers.start} to {layers.stop - 1} of {len(sources)} chunks"
        )
        if self._coded:
            gpu_slots, host_slots = (targets, sources) if lane is Lane.IN else (sources, targets)
            gpu.check(gpu_slots)
            copy = functools.partial(self._coded[lane].copy, gpu_slots, host_slots, layers)
        else:
            layer_bytes = gpu.record // self._layers
            copy = functools.partial(
                self._copy,
                target.addresses(targets, layers.start * layer_bytes),
                source.addresses(sources, layers.start * layer_bytes),
                np.full(len(sources), len(layers) * layer_bytes, np.uint64),
                self._streams[lane].cuda_stream,
            )
        self._times.copy(lane, len(sources) * len(layers) * (host.record // self._layers), copy)

    # Tickets.

    @_ends_the_device
    def mark(self, lane: Lane, gate: int | None = None) -> CudaTicket:
        stream = self._streams[lane]
        self._last[lane] = ticket = CudaTicket(lane, self._issued[lane])
        ticket.event.record(stream)
        if gate is not None:
            self._times.gated(gate, ticket.event)
            # the ticket's event stays as it is; the gate's is recorded again by each step
            self._gates[gate].record(stream)
        return ticket

    @_ends_the_device
    def wait(self, lane: Lane, ticket: CudaTicket) -> None:
        if lane is Lane.COMPUTE:
            self._times.held(ticket.event)
        self._streams[lane].wait_event(ticket.event)
        if lane in self._coded:
            self._coded[lane].entry.wait_event(ticket.event)

    @_ends_the_device
    def ready(self, ticket: CudaTicket) -> bool:
        return bool(ticket.event.query())

    @_ends_the_device
    def synchronize(self, ticket: CudaTicket) -> None:
        if not _reached(ticket.event):
            unfinished = [last for last in self._last.values() if not last.event.query()]
            behind = "; ".join(
                f"lane {last.lane.name}, not past {last.what}" for last in unfinished
            )
            late = f"lane {ticket.lane.name} is not past {ticket.what} after {OVERDUE_SECONDS:g} s"
            raise InvariantError(f"{late}; behind: {behind or 'none any more'}")
        self._times.seen(ticket.event)

    # The step.

    def keep_states(self, slots: int, shape: StateShape) -> None:
        assert self._pool is not None
        self._states = StatePool.behind_kv(self._pool, slots, shape)

    def load(
        self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int
    ) -> None:
        # imported here because only CUDA installations have Triton
        from ...plugins.attention.kernel import make_work_list
        from ...plugins.attention.work_list import Capacity
        from ...plugins.kv_forms.host_copy_kernel import copy_words

        assert self._pool is not None
        _, _, _, kv_heads, chunk_tokens, _ = self._pool.shape
        shapes = Shapes(most_tokens, seats, chunk_tokens)
        capacity = Capacity(shapes.most_tokens, shapes.most_segments, blocks * chunk_tokens)
        self._engine = engine
        decoder = engine.manifest.decoder
        self._times.loaded(decoder.kv_layers)
        heads = Shard(decoder, engine.manifest.tensor_parallel).heads
        self._work = make_work_list(
            capacity, heads, kv_heads, decoder.head_dim, engine.dtype, pool=self._pool
        )
        for gate in gates:
            # A gate never marked is open. Inside a graph only a recorded event can be waited for,
            # so each is recorded once.
            self._gates[gate] = torch.cuda.Event()
            self._gates[gate].record(self._streams[Lane.IN])
        events = {gate: event.cuda_event for gate, event in self._gates.items()}
        if self._states is not None:
            self._states.make_work(shapes.most_tokens, shapes.most_segments)
        self._handle = register_pool(
            self._pool, self._pass_gate, self._work, events, states=self._states
        )
        with self._computing():
            self._buffers = StepBuffers(shapes, "cuda")
            self._results = Staging(pinned=True)
            self._copy_words = copy_words
            self._block_table = torch.zeros(seats, blocks, dtype=torch.int32, device="cuda")
            self._last_samples = torch.zeros(seats, dtype=torch.int32, device="cuda")
            self._sampler = make_sampler(engine.vocab_size, "cuda", self._buffers.place)
        torch.cuda.synchronize()  # pools are zeroed on another stream
        if not self._enforce_eager:
            self._capture(shapes)
        if self._host is not None:  # only now: a capture fails if another thread pins meanwhile
            self._host.grow()

    def _capture(self, shapes: Shapes) -> None:
        rows = max(shape.rows for shape in shapes.captured)

        def step(shape: Shape) -> None:
            # Graphs overwrite each other's memory, so the logits are copied out of it.
            self._captured_logits[: shape.rows].copy_(self._forward(shape))

        # ranks that differ wait in each other's sums
        with give_up_after(CAPTURE_SECONDS), self._computing():
            self._captured_logits = torch.zeros(rows, self._engine.vocab_size, device="cuda")
            # The largest comes first, so the others fit in its memory.
            ordered = sorted(
                shapes.captured, key=lambda shape: (not shape.generation, shape), reverse=True
            )
            for done, shape in enumerate(ordered, start=1):
                # A run just before the capture does the work that cannot be recorded: kernels are
                # compiled and loaded, libraries allocate memory, TensorRT takes the sizes.
                self._buffers.idle(shape)
                step(shape)
                self._graphs.capture(shape, step)
                show_progress("capturing graphs", done, len(ordered))
            torch.cuda.synchronize()

    def _pass_gate(self, layer: int) -> None:
        """Called by the engine, on COMPUTE: in each launch, or once while a graph is captured."""
        event = self._gates.get(layer)
        if event is None:
            return
        if torch.cuda.is_current_stream_capturing():
            self._runtime.wait_external(self._compute.cuda_stream, event.cuda_event)
        else:
            self._compute.wait_event(event)

    def _forward(self, shape: Shape) -> Tensor:
        """Logits [rows, vocab] float32 of the batch in the buffers."""
        staged = self._buffers.batch(shape)
        batch = forward_batch(staged, self._last_samples, self._block_table)
        assert self._handle is not None
        sharing = None if any(self._engine.manifest.decoder.windows) else staged.sharing
        longest = 1 if shape.generation else shape.tokens
        self._work.build(staged.segments, longest, sharing)
        if self._states is not None:
            self._states.list_work(staged.segments, staged.state_out, longest)
        return self._engine.forward(batch, self._handle)

    @_ends_the_device
    def upload(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        with self._computing():
            self._shape = self._buffers.upload(inputs)
            if len(inputs.block_cells):
                self._block_table.view(-1).index_copy_(
                    0, self._buffers.block_cells, self._buffers.block_slots
                )
            self._sampler.start(inputs.sampling.starts)

    @_ends_the_device
    def run(self) -> None:
        self._issued[Lane.COMPUTE] = f"a step of {len(self._inputs.token_ids)} tokens"
        with self._computing():
            self._times.step(len(self._inputs.token_ids), self._run)

    def _run(self) -> None:
        self._logits = (
            self._captured_logits
            if self._graphs.replay(self._shape)
            else self._forward(self._shape)
        )

    @_ends_the_device
    def sample(self) -> tuple[CudaTicket, np.ndarray, Scores | None]:
        inputs = self._inputs
        with self._computing():
            drawn, scored = self._sampler.sample(
                self._logits[: len(inputs.sample_rows)], inputs.sampling
            )
            drawn = drawn.int()
            self._last_samples.index_copy_(0, self._buffers.sample_seats, drawn)
            tokens = self._results.take(len(drawn))
            self._copy_words(tokens, drawn)
            self._results.issued()
            scores = None
            # pinned buffers of torch's cache: not reused while referenced here or written on that
            # stream
            if scored is not None:
                scores = Scores.empty(len(scored.logprobs), scored.top_ids.shape[1], pinned=True)
                for target, source in zip(scores, scored, strict=True):
                    target.copy_(source, non_blocking=True)
        return self.mark(Lane.COMPUTE), tokens.numpy(), scores

    @_ends_the_device
    def transfer_seconds(self) -> TransferSeconds:
        return self._times.read()

    def watch(self, report: Callable[[Work], None]) -> None:
        self._times.watch(report, torch.cuda.Event.synchronize)

    def close(self, host_in_use: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        idle = self._finish()
        if idle:
            self._times.read()  # the watcher gets the last of the times
        if self._handle is not None:
            release_pool(self._handle)
        self._graphs.clear()
        # Memory that a copy, or a call to a shared store, may still use is freed by the end of the
        # process, which is near.
        if self._host is not None:
            self._host.free(idle and not host_in_use)
        self._coded.clear()
        self._pool = self._host = self._states = None

    def _finish(self) -> bool:
        """Waits for all lanes. Returns False if they have failed or hang."""
        try:
            for stream in (
                *self._streams.values(),
                *(coded.entry for coded in self._coded.values()),
            ):
                event = torch.cuda.Event()
                event.record(stream)
                if not _reached(event):
                    return False
        except RuntimeError:  # a driver error that `wait` has already raised
            return False
        return True


def _reached(event: torch.cuda.Event) -> bool:
    """Waits for the event, OVERDUE_SECONDS at most; other threads run meanwhile."""
    deadline = time.monotonic() + OVERDUE_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
