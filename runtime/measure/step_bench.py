"""Times steps and copies on a device in the service's way: through the executor, with two steps in
flight.

The block tables of a batch name slots like this, for R rows and a pool that may be smaller than all
their contexts:

    slot    0 .. seats-1          seats .. pool-1
            last chunk of row r   all other chunks, row after row, in a cycle

So every row writes to its own slot, and slots that rows share are only read. Rows that share a slot
are far apart, so no cache delivers their KV faster than the pool's memory.

With linear attention each row reads and writes one state, in the state slot of its seat. A step
says that the state has just been brought there, so it can be repeated.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple, Self

import numpy as np

from ...builder.forward_batch import NO_STATE
from ...plugins.state.pool import StateShape
from ...scheduler.config import SchedulerConfig
from ...scheduler.plan import (
    NO_TICKETS,
    BlockUpdate,
    Join,
    Lane,
    Span,
    StateSwapIn,
    StepPlan,
)
from ...scheduler.types import GREEDY, RequestId, RowId, SettingError
from ..device.protocol import Device, ForwardPass
from ..executor import Executor

STEPS_IN_FLIGHT = 2
UNCOUNTED = 2  # first steps of a batch: kernels are compiled, caches filled
LEAST, MOST = 7, 1000  # number of times for a median


class CopyTime(NamedTuple):
    """Seconds to copy `chunks` chunks, `layers` layers in a piece, one direction alone, and each
    direction while both run."""

    layers: int
    chunks: int
    swap_in: float
    swap_out: float
    both: float


class HistoryTime(NamedTuple):
    """Seconds of one turn of a batch of conversations, each with `history` tokens before its
    prompt."""

    history: int
    prefill_recomputed: float
    prefill_cached: float
    generation: float


class StepBench:
    """An engine on a device, with batches made by hand.

    Owns the device, and closes it at the end of the `with` block; not after an exception, when
    lanes may wait for a rank that is gone.

    Every timing method takes about `seconds`, more if a few runs take longer. With several ranks
    all make the same calls: every run is made on all of them side by side, equally often, and the
    slowest rank's time counts.
    """

    def __init__(
        self,
        device: Device,
        engine: ForwardPass,
        config: SchedulerConfig,
        seconds: float,
        slowest: Callable[[float], float] = float,
        states: StateShape | None = None,
    ):
        """slowest: returns the largest value of all ranks, which call it together. states: of a
        model with linear attention, as `config.states` says.

        SettingError if the pools are too small for one context besides the chunks that are written.
        """
        self.seats = config.max_num_seqs
        if config.states is None:
            self.seats = max(self.seats, config.max_num_batched_tokens // config.chunk_tokens)
        if config.max_num_batched_tokens < config.chunk_tokens:
            raise SettingError(
                "--max-num-batched-tokens", f"must hold a chunk of {config.chunk_tokens} tokens"
            )
        needed = self.seats + config.chunks(config.max_model_len)
        if needed > config.gpu_kv_chunks:
            raise SettingError(
                "--gpu-kv-bytes", f"must hold {needed} chunks, not {config.gpu_kv_chunks}"
            )
        self.config = config
        self._vocab_size = engine.vocab_size
        self._layers = engine.kv_shape(1, config.chunk_tokens)[1]
        self._device = device
        self._seconds = seconds
        self._slowest = slowest
        self._dice = Random(0)
        self._step = 0
        self._executor = Executor(
            device, engine, replace(config, max_num_seqs=self.seats), states=states
        )
        self._fill_pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            self._executor.close()

    def _fill_pool(self) -> None:
        """Writes to every GPU slot: before that, all pages of a pool may be one page of zeros,
        which is read faster."""
        hosts = self.config.host_kv_chunks
        for first in range(0, self.config.gpu_kv_chunks, hosts):
            targets = np.arange(
                first, min(first + hosts, self.config.gpu_kv_chunks), dtype=np.int32
            )
            self._device.copy(
                Lane.IN, np.arange(len(targets), dtype=np.int32), targets, range(self._layers)
            )
        self._device.synchronize(self._device.mark(Lane.IN))

    # Steps of batches, and their times.

    def chunks_at(self, context: int, count: int) -> float:
        """Seconds of a step that computes the last chunk of `count` contexts, without samples."""
        self._seat([context] * count)
        start = context - self.config.chunk_tokens
        return self._step_seconds(
            self._spans([Span(seat, start, context, start, False) for seat in range(count)])
        )

    def prompt_at(self, context: int, tokens: int) -> float:
        """Seconds of a step that computes the last `tokens` tokens of one context, without a
        sample."""
        self._seat([context])
        start = context - tokens
        return self._step_seconds(self._spans([Span(0, start, context, start, False)]))

    def fresh(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens at the shortest context: whole chunks and a rest,
        each sampled; with states one row, because each row would pay for a state."""
        size = self.config.chunk_tokens if self.config.states is None else tokens
        lengths = [size] * (tokens // size) + [tokens % size] * (tokens % size > 0)
        self._seat(lengths)
        return self._step_seconds(
            self._spans([Span(seat, 0, length, 0, True) for seat, length in enumerate(lengths)])
        )

    def generation(self, context: int, rows: int) -> float:
        """Seconds of a step in which each of `rows` rows generates the last token of its
        context."""
        self._seat([context] * rows)
        return self._step_seconds(self._generate([context - 1] * rows))

    def _step_seconds(self, plan: StepPlan) -> float:
        """Median time from one step's end to the next one's. It contains the host's work if the
        device does not hide it."""
        self._step_times(plan, UNCOUNTED)
        return self._median(partial(self._step_times, plan))

    def _step_times(self, plan: StepPlan, count: int) -> list[float]:
        for _ in range(STEPS_IN_FLIGHT - 1):
            self._launch(plan)
        times: list[float] = []
        last = time.perf_counter()
        for _ in range(count):
            self._launch(plan)
            self._executor.wait()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        for _ in range(STEPS_IN_FLIGHT - 1):
            self._executor.wait()
        return times

    def _median(self, times_of: Callable[[int], list[float]]) -> float:
        """The median of a few times, and of as many more as `seconds` allows; equally many on all
        ranks."""
        times = times_of(LEAST)
        fitting = int(self._seconds / self._slowest(statistics.median(times)))
        if fitting > LEAST:
            times += times_of(min(fitting, MOST) - LEAST)
        return self._slowest(statistics.median(times))

    def _seat(self, contexts: Sequence[int]) -> None:
        """Gives each seat from 0 on one context, in the slots described above."""
        shared = self.config.gpu_kv_chunks - self.seats
        at = 0
        rows = []
        for seat, context in enumerate(contexts):
            read = self.config.chunks(context) - 1
            rows.append((*(self.seats + (at + i) % shared for i in range(read)), seat))
            at += read
        self._take_seats(rows)

    def _take_seats(self, rows: Sequence[Sequence[int]]) -> None:
        """Gives seat s the slots rows[s]."""
        joins = tuple(Join(seat, _row(seat), GREEDY) for seat in range(len(rows)))
        blocks = tuple(BlockUpdate(seat, 0, tuple(slots)) for seat, slots in enumerate(rows))
        self._launch(replace(EMPTY, joins=joins, blocks=blocks))
        self._executor.wait()

    def _spans(self, spans: Sequence[Span]) -> StepPlan:
        tokens = sum(span.end - span.start for span in spans)
        ids = array("i", (self._dice.randrange(self._vocab_size) for _ in range(tokens)))
        samples = tuple(_row(span.seat) for span in spans if span.samples)
        plan = replace(EMPTY, spans=tuple(spans), token_ids=ids, samples=samples)
        return self._with_states(plan, {span.seat: span.start for span in spans})

    def _generate(self, positions: Sequence[int]) -> StepPlan:
        seats = range(len(positions))
        plan = replace(
            EMPTY,
            generate=array("i", seats),
            positions=array("i", positions),
            samples=tuple(_row(seat) for seat in seats),
        )
        return self._with_states(plan, dict(enumerate(positions)))

    def _with_states(self, plan: StepPlan, starts: Mapping[int, int]) -> StepPlan:
        """The plan with the state of each seat, which goes on from the position in `starts`."""
        if self.config.states is None:
            return plan
        return replace(
            plan,
            state_in=tuple(seat if start else NO_STATE for seat, start in starts.items()),
            state_out=tuple(starts),
            state_swap_ins=tuple(
                StateSwapIn(seat, seat, start) for seat, start in starts.items() if start
            ),
        )

    def _launch(self, plan: StepPlan) -> None:
        self._step += 1
        self._executor.launch(replace(plan, step=self._step))

    # Copies.

    def copies(self, layers: int, chunks: int) -> CopyTime:
        """Times copies of `chunks` chunks in random slots, in each direction. The HOST pool must
        hold twice as many."""
        groups = [
            range(at, min(at + layers, self._layers)) for at in range(0, self._layers, layers)
        ]
        slots = {}
        for pool, size in (
            ("gpu", self.config.gpu_kv_chunks),
            ("host", self.config.host_kv_chunks),
        ):
            chosen = np.array(self._dice.sample(range(size), 2 * chunks), np.int32)
            slots[pool] = {Lane.IN: chosen[:chunks], Lane.OUT: chosen[chunks:]}

        def copy(*lanes: Lane) -> None:
            # The directions alternate: neither direction's pieces may wait until the host has
            # issued all of the other's.
            for group in groups:
                for lane in lanes:
                    source, target = ("host", "gpu") if lane is Lane.IN else ("gpu", "host")
                    self._device.copy(
                        lane, slots[source][lane].copy(), slots[target][lane].copy(), group
                    )
            for ticket in [self._device.mark(lane) for lane in lanes]:
                self._device.synchronize(ticket)

        times = (
            self._seconds_of(copy, *lanes)
            for lanes in ((Lane.IN,), (Lane.OUT,), (Lane.IN, Lane.OUT))
        )
        return CopyTime(layers, chunks, *times)

    def _seconds_of(self, work: Callable[..., None], *arguments: Lane) -> float:
        """Median time of work that returns when it is done."""

        def times(count: int) -> list[float]:
            taken = []
            for _ in range(count):
                start = time.perf_counter()
                work(*arguments)
                taken.append(time.perf_counter() - start)
            return taken

        work(*arguments)
        return self._median(times)

    # A turn.

    def turn(self, history: int, prompt: int, generated: int, requests: int) -> HistoryTime:
        """Times one turn of `requests` conversations at once, each once: long runs need no median.

        SettingError if the pool does not hold all of their KV, each in its own slots.
        """
        chunks = self.config.chunks(history + prompt + generated)
        if requests * chunks > self.config.gpu_kv_chunks:
            raise SettingError(
                "--gpu-kv-bytes",
                f"must hold {requests * chunks} chunks for {requests} such histories",
            )
        self._take_seats([range(seat * chunks, (seat + 1) * chunks) for seat in range(requests)])
        end = history + prompt
        first = [Span(seat, history, end, history, True) for seat in range(requests)]
        recomputed = self._seconds_of_run(
            self._pieces([span._replace(start=0, write_from=0) for span in first])
        )
        cached = self._seconds_of_run(self._pieces(first))
        # the prefill samples the first token
        steps = (self._generate([end + i] * requests) for i in range(generated - 1))
        return HistoryTime(history, recomputed, cached, self._seconds_of_run(steps))

    def _pieces(self, spans: Sequence[Span]) -> Iterator[StepPlan]:
        """Full steps of the spans, in their order."""
        step: list[Span] = []
        room = self.config.max_num_batched_tokens
        for span in spans:
            at = span.start
            while at < span.end:
                end = min(span.end, at + room)
                step.append(Span(span.seat, at, end, at, end == span.end))
                room -= end - at
                at = end
                if not room:
                    yield self._spans(step)
                    step = []
                    room = self.config.max_num_batched_tokens
        if step:
            yield self._spans(step)

    def _seconds_of_run(self, plans: Iterable[StepPlan]) -> float:
        """From the first launch to the last step's end, two steps in flight."""
        in_flight = 0
        start = time.perf_counter()
        for plan in plans:
            self._launch(plan)
            in_flight += 1
            if in_flight == STEPS_IN_FLIGHT:
                self._executor.wait()
                in_flight -= 1
        for _ in range(in_flight):
            self._executor.wait()
        return self._slowest(time.perf_counter() - start)


EMPTY = StepPlan(
    step=0,
    copies=(),
    after=NO_TICKETS,
    joins=(),
    blocks=(),
    generate=array("i"),
    positions=array("i"),
    spans=(),
    token_ids=array("i"),
    samples=(),
)


def _row(seat: int) -> RowId:
    return RowId(RequestId(seat), 0)
