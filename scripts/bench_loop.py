"""What `bench_steps` and `bench_tiers` run on: a device that keeps times, the engine's loop with requests of random
tokens, and the caches of the former."""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..plugins.kv_forms.forms import Form
from ..runtime.device.cpu import CpuDevice
from ..runtime.device.protocol import ForwardPass
from ..runtime.disk.store import DiskSettings
from ..runtime.engine import Engine
from ..runtime.executor import GROUP_LAYERS, MAX_IN_FLIGHT, Executor
from ..runtime.launch.options import parse_bytes
from ..runtime.loop import EngineLoop
from ..runtime.step.inputs import StepInputs
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import CostProfile
from ..scheduler.plan import Lane
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import InvariantError, Request, RequestId, SettingError, Tier, Usage

QUIET_STEPS = 20  # before each turn, beside which the steps during the turn are seen
TURN_STEPS = 20  # the most that a turn is expected to take
UNMEASURED_STEPS = 8  # of rows while gaps are measured: before all have begun, and in flight at the end
SPARE_CHUNKS = 4  # in the smallest GPU cache that holds a turn


# The device, and when its work began and ended.


_Device: Any = object  # of the class that mixes it in


class Timed(_Device):
    """A mixin of devices: keeps when copies in and steps began and ended, on the device's own clock.

    Several executors may use it one after the other: pools are made and the engine is loaded by the first one alone,
    which must have the largest pools and the smallest layer groups. `end`, not `close`, ends it. A later executor that
    uses fewer gates marks but those; the others stay as they were left, open.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaded = False
        self._start = self._open = None
        self._allocated: set[Tier] = set()
        self.recording = False
        self.copies_in: list[tuple[Any, Any]] = []
        self.steps: list[tuple[Any, Any]] = []
        self.late = 0
        """Steps that were wholly issued only after the one before had ended: the device may have waited within them."""

    def stamp(self, lane: Lane) -> Any:
        """Takes the time at this point of the lane's order."""
        raise NotImplementedError

    def passed(self, stamp: Any) -> bool:
        raise NotImplementedError

    def seconds(self, start: Any, end: Any) -> float:
        """Between two stamps that are passed."""
        raise NotImplementedError

    def start_recording(self) -> None:
        """Forgets what is recorded, and records from here on."""
        self.recording, self.late = True, 0
        self.copies_in, self.steps = [], []

    def allocate_pool(self, tier: Tier, shape: tuple[int, ...], dtype: torch.dtype, form: Form | None = None) -> None:
        if tier not in self._allocated:
            super().allocate_pool(tier, shape, dtype, form)
            self._allocated.add(tier)

    def load(self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int) -> None:
        if not self._loaded:
            super().load(engine, seats, blocks, gates, most_tokens)
            self._loaded = True

    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        timed = self.recording and lane is Lane.IN
        start = self.stamp(lane) if timed else None
        super().copy(lane, sources, targets, layers)
        if timed:
            self.copies_in.append((start, self.stamp(lane)))

    def upload(self, inputs: StepInputs) -> None:
        self._start = self.stamp(Lane.COMPUTE) if self.recording else None
        super().upload(inputs)

    def run(self) -> None:
        super().run()
        self._open = self._start

    def mark(self, lane: Lane, gate: int | None = None) -> Any:
        # `sample` ends with a mark; a stamp behind it might not be passed yet when the step is known to be complete.
        if lane is Lane.COMPUTE and self._open is not None:
            self.late += bool(self.steps) and self.passed(self.steps[-1][1])
            self.steps.append((self._open, self.stamp(lane)))
            self._open = None
        return super().mark(lane, gate)

    def close(self) -> None:
        """Nothing: other executors follow."""

    def end(self) -> None:
        super().close()


class TimedCpu(Timed, CpuDevice):
    def stamp(self, lane: Lane) -> list[float]:
        taken: list[float] = []
        self._issue(lane, lambda: taken.append(time.perf_counter()))
        return taken

    def passed(self, stamp: list[float]) -> bool:
        return bool(stamp)

    def seconds(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]


def make_device(name: str) -> Timed:
    if name == "cpu":
        return TimedCpu()
    from ..runtime.device.cuda import CudaDevice

    class TimedCuda(Timed, CudaDevice):
        def stamp(self, lane: Lane) -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._streams[lane])
            return event

        def passed(self, stamp: torch.cuda.Event) -> bool:
            return stamp.query()

        def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
            return start.elapsed_time(end) / 1e3

    return TimedCuda()


# The loop.


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of the host's work on a pass of the loop, when its result was applied, and rows that got a token."""

    plan: float
    launch: float
    wait: float
    apply: float
    at: float
    rows: int


class Loop:
    """The engine's loop with requests of random tokens; keeps the times of its steps."""

    def __init__(
        self,
        device: Timed,
        engine: Engine,
        config: SchedulerConfig,
        cost: CostProfile,
        group_layers: int = GROUP_LAYERS,
        disk: DiskSettings | None = None,
    ):
        """disk: what an earlier loop left there is found again, as after a restart."""
        self.config, self.device = config, device
        self.scheduler = Scheduler(config, cost)
        self._executor = Executor(device, engine, config, group_layers, disk=disk)
        self.scheduler.disk.adopt(self._executor.disk_records(), time.monotonic())
        self._loop = EngineLoop(self.scheduler, self._executor)
        self._vocab_size, self._dice = engine.vocab_size, np.random.default_rng(0)
        self._requests = 0
        self.steps: list[Step] = []
        self.begun: dict[RequestId, tuple[float, Usage]] = {}
        """When the first token of each request was there, and where its prompt's KV came from."""
        self.ended: dict[RequestId, float] = {}
        """When the end of each request was told."""

    def random_ids(self, count: int) -> array[int]:
        return array("i", self._dice.integers(0, self._vocab_size, count, np.int32).tobytes())

    def add(self, prompt: array[int], max_tokens: int) -> RequestId:
        self._requests += 1
        request = RequestId(self._requests)
        self.scheduler.add(Request(request, prompt, max_tokens), time.monotonic())
        return request

    def step(self) -> bool:
        """One pass; False if there was nothing to do."""
        before = self._seconds()
        applied = self._loop.step()
        if applied is None:
            return not self._loop.idle
        at = time.perf_counter()
        plan, launch, wait, apply = (after - spent for after, spent in zip(self._seconds(), before, strict=True))
        self.steps.append(Step(plan, launch, wait, apply, at, len(applied.requests)))
        for output in applied.events:
            if output.usage is not None:
                self.begun[output.request] = (at, output.usage)
            if output.finish is not None:
                self.ended[output.request] = at
        return True

    def _seconds(self) -> list[float]:
        """Of all steps so far: planning, launching, waiting, applying."""
        counters = self._loop.counters
        return [part.seconds for part in (counters.plan, counters.launch, counters.wait, counters.apply)]

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.step():
                raise InvariantError("nothing is left to do, and what was waited for has not come")

    def drain(self) -> None:
        """Until nothing is left to do, on any lane."""
        while self.step():
            pass
        for lane in Lane:
            self.device.synchronize(self.device.mark(lane))

    def close(self) -> None:
        """Ends what reads and writes the disk, once nothing is left to do."""
        self.drain()
        self._executor.close()

    def steady(self, rows: int, steps: int) -> list[Step]:
        """So many steps more, in each of which `rows` rows get a token."""
        first = len(self.steps)
        self.run_until(lambda: len(self.steps) == first + steps)
        return self.checked(first, rows)

    def checked(self, first: int, rows: int) -> list[Step]:
        """The steps from `first` on. InvariantError if rows have ended."""
        if (least := min((step.rows for step in self.steps[first:]), default=rows)) < rows:
            raise InvariantError(f"{rows} rows were to generate throughout, and once only {least} did")
        return self.steps[first:]


def intervals(steps: Sequence[Step]) -> list[float]:
    """Seconds from each step to the next: every row that generates in both waits so long for its token."""
    return [after.at - before.at for before, after in pairwise(steps)]


# Sizes.


class Sizes:
    """Caches that are just large enough, in chunks. SettingError if they, or the model's contexts, are too small."""

    def __init__(self, args: argparse.Namespace, engine: Engine):
        size = args.chunk_tokens
        self.record = engine.chunk_bytes(size)
        self.seats = max(
            args.gap_rows if "gaps" in args.parts else 1, args.rows + 1, args.max_num_batched_tokens // size
        )
        steps = 2 * (args.repeats + 1) * (QUIET_STEPS + TURN_STEPS)
        steps += 2 * args.rows * args.row_context // args.max_num_batched_tokens  # until the last row has joined
        self.row_tokens = steps
        row_end = args.row_context + size + steps
        self.gap_start = max(1, args.gap_context - args.steps // 2 - size // 2)
        self.gap_tokens = args.steps + UNMEASURED_STEPS
        gap_end = self.gap_start + size + self.gap_tokens + MAX_IN_FLIGHT
        self.longest = max(args.history + args.new_tokens + 1, row_end, gap_end)
        if self.longest > engine.manifest.max_model_len:
            raise SettingError(
                "--history",
                f"contexts come to {self.longest} tokens, the model's to {engine.manifest.max_model_len}; take shorter "
                "ones, or build it with --set max_position_embeddings",
            )
        self.history = args.history // size

        def chunks(tokens: int) -> int:
            return -(-tokens // size)

        alone = max(chunks(args.history + args.new_tokens) + SPARE_CHUNKS, chunks(self.longest))
        self.returning = {0: alone, args.rows: alone + args.rows * chunks(row_end)}
        # While one of them returns, the others leave nothing of it on the GPU.
        idle = {rows: pool - rows * chunks(args.row_context) for rows, pool in self.returning.items()}
        self.histories = {rows: 2 + pool // self.history for rows, pool in idle.items()}
        self.gaps = max(args.gap_rows * chunks(gap_end), chunks(self.longest))
        self.measuring = max(self.seats + chunks(self.longest), 2 * self.history)
        wanted = {"copies": self.measuring, "returning": max(self.returning.values()), "gaps": self.gaps}
        gpu = max(self.measuring, *(wanted[part] for part in args.parts))
        # A turn adds a chunk or two; and a quarter of HOST is for copies made ahead.
        turns = (
            max(self.histories.values()) * self.history
            + 4 * chunks(args.new_tokens) * (args.repeats + 1)
            + SPARE_CHUNKS
        )
        host = max(4 * (alone + SPARE_CHUNKS), turns)
        self.gpu = self._given(args.gpu_kv_bytes, "--gpu-kv-bytes", gpu)
        self.host = self._given(args.host_kv_bytes, "--host-kv-bytes", host)

    def _given(self, text: str | None, setting: str, needed: int) -> int:
        given = needed if text is None else parse_bytes(text, setting) // self.record
        if given < needed:
            raise SettingError(setting, f"must hold {needed} chunks of {self.record} bytes, not {given}")
        return given

    def config(self, args: argparse.Namespace) -> SchedulerConfig:
        """Of the pools that are made; parts have smaller GPU caches. Whatever is idle is copied out ahead of time."""
        return SchedulerConfig(
            gpu_kv_chunks=self.gpu,
            host_kv_chunks=self.host,
            max_model_len=self.longest,
            max_num_seqs=self.seats,
            max_num_batched_tokens=args.max_num_batched_tokens,
            chunk_tokens=args.chunk_tokens,
            eviction="lru",  # of a history that others have displaced nothing is left on the GPU
            swap_out_below=1.0,
            generation_reserve=0.0,
        )
