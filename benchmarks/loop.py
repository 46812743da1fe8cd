"""The base of the benchmarks of steps and tiers: a device that keeps times, and the service's loop
without messages.

Also shared by their commands: counts as options, parts, the engine loaded once, lines and JSON of
each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pensieve.plugins.kv_forms.forms import Form
from pensieve.plugins.state.pool import StateShape
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.device.protocol import Device, ForwardPass
from pensieve.runtime.engine import Engine
from pensieve.runtime.engine_session import EngineSession
from pensieve.runtime.executor import Executor
from pensieve.runtime.step.inputs import StepInputs
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.declaration import flag
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import (
    GREEDY,
    InvariantError,
    Request,
    RequestId,
    Sampling,
    SettingError,
    Tier,
    TokenLogprobs,
    Usage,
)
from pensieve.scripts.command import add_kv_cache_dtype

SPARE_CHUNKS = 4  # in the smallest GPU cache that holds a turn


# The device, and when its work began and ended.


_Device: Any = object  # of the class that mixes it in


class Timed(_Device):
    """A mixin of devices: records when copies in and steps began and ended, on the device's own
    clock.

    Several executors may use it one after the other. Only the first one makes the pools and loads
    the engine, so it must have the largest pools and the smallest layer groups. With states all
    have GPU pools of one size. It is ended by `end`, not by `close`. A later executor with fewer
    gates marks only those; the others stay open.
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
        """Steps that were issued only after the previous one had ended: the device may have
        waited."""

    def stamp(self, lane: Lane) -> Any:
        """Takes the time at this point of the lane's order."""
        raise NotImplementedError

    def passed(self, stamp: Any) -> bool:
        raise NotImplementedError

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two stamps that are passed."""
        raise NotImplementedError

    def start_recording(self) -> None:
        """Drops all records, and starts recording."""
        self.recording, self.late = True, 0
        self.copies_in, self.steps = [], []

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        if tier not in self._allocated:
            super().allocate_pool(tier, shape, dtype, form, most)
            self._allocated.add(tier)

    def keep_states(self, slots: int, shape: StateShape) -> None:
        if not self._loaded:
            super().keep_states(slots, shape)

    def load(
        self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int
    ) -> None:
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
        # `sample` ends with a mark. A stamp after it might not be passed when the step is known to
        # be complete.
        if lane is Lane.COMPUTE and self._open is not None:
            self.late += bool(self.steps) and self.passed(self.steps[-1][1])
            self.steps.append((self._open, self.stamp(lane)))
            self._open = None
        return super().mark(lane, gate)

    def close(self, host_in_use: bool = False) -> None:
        """Has no effect: other executors follow."""

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
    from pensieve.runtime.device.cuda import CudaDevice

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


class Pools:
    """Pools in chunks, just large enough for what is measured. Subclasses work them out.

    size, batch     tokens of a chunk, of a full batch
    longest, seats  the longest context, tokens; running requests
    """

    size: int
    batch: int
    longest: int
    seats: int
    gpu: int
    host: int
    disk = 0

    def config(self) -> SchedulerConfig:
        """Eviction is least recently used, and all idle chunks are copied out ahead of time: a
        displaced history leaves no chunk on the GPU."""
        return SchedulerConfig(
            gpu_kv_chunks=self.gpu,
            host_kv_chunks=self.host,
            disk_kv_chunks=self.disk,
            max_model_len=self.longest,
            max_num_seqs=self.seats,
            max_num_batched_tokens=self.batch,
            chunk_tokens=self.size,
            eviction="lru",
            swap_out_below=1.0,
            generation_reserve=0.0,
        )


@dataclass(frozen=True, slots=True)
class LoopStep:
    """Seconds of the host's work in a pass of the loop, the time when its result was applied, and
    rows that got a token."""

    plan: float
    launch: float
    wait: float
    apply: float
    at: float
    rows: int


@dataclass(slots=True)
class LoopAnswer:
    """A reply so far. `usage` comes with the first token.

    began, ended    times of its first token and of its end, by `time.perf_counter`
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: Usage | None = None
    done: bool = False
    began: float = 0.0
    ended: float = 0.0


class Loop:
    """The engine's loop with requests of random tokens; keeps their answers and the times of its
    steps."""

    def __init__(
        self,
        device: Device,
        engine: ForwardPass,
        config: SchedulerConfig,
        cost: CostProfile,
        seed: int = 0,
        make_executor: Callable[[Device, ForwardPass, SchedulerConfig], Executor] = Executor,
    ):
        """Finds the records of an earlier executor on the disk, as after a restart."""
        self.config = config
        self.device = device
        self.scheduler = Scheduler(config, cost)
        self.executor = make_executor(device, engine, config)
        self.scheduler.lower.adopt(self.executor.stored_records(), time.monotonic())
        self._session = EngineSession(self.scheduler, self.executor)
        self._vocab_size = engine.vocab_size
        self._dice = np.random.default_rng(seed)
        self.answers: dict[RequestId, LoopAnswer] = {}
        self.steps: list[LoopStep] = []

    def random_ids(self, count: int) -> array[int]:
        return random_ids(self._dice, self._vocab_size, count)

    def add(
        self,
        prompt: array[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        priority: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> LoopAnswer:
        number = RequestId(len(self.answers) + 1)
        request = Request(
            number,
            prompt,
            max_tokens,
            stop_ids=frozenset(stop_ids),
            sampling=sampling,
            priority=priority,
        )
        self._session.add(request)
        answer = self.answers[number] = LoopAnswer()
        return answer

    def step(self) -> bool:
        """Makes one pass; returns False if there was nothing to do."""
        before = self._seconds()
        applied = self._session.step()
        if applied is None:
            return not self._session.idle
        at = time.perf_counter()
        plan, launch, wait, apply = (
            after - spent for after, spent in zip(self._seconds(), before, strict=True)
        )
        rows = 0
        for row in applied.results():
            if row.error is not None:
                raise row.error
            answer = self.answers[row.request]
            answer.tokens += row.tokens
            answer.logprobs += row.logprobs
            rows += bool(row.tokens)
            if row.usage is not None:
                answer.usage = row.usage
                answer.began = at
            if row.finish is not None:
                answer.done = True
                answer.ended = at
        self.steps.append(LoopStep(plan, launch, wait, apply, at, rows))
        return True

    def _seconds(self) -> list[float]:
        """Seconds of all steps so far: planning, launching, waiting, applying."""
        counters = self._session.counters
        return [
            part.seconds for part in (counters.plan, counters.launch, counters.wait, counters.apply)
        ]

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.step():
                raise InvariantError("nothing is left to do, and the awaited event has not come")

    def abort_all(self) -> None:
        for request, answer in self.answers.items():
            if not answer.done:
                self._session.abort(request)
        self.drain()

    def drain(self) -> None:
        """Runs until no work is left, on any lane."""
        while self.step():
            pass
        for lane in Lane:
            self.device.synchronize(self.device.mark(lane))

    def close(self) -> None:
        """Closes the executor when no work is left."""
        self.drain()
        self.executor.close()

    def steady(self, rows: int, steps: int) -> list[LoopStep]:
        """Runs `steps` more steps, in each of which `rows` rows get a token."""
        first = len(self.steps)
        self.run_until(lambda: len(self.steps) == first + steps)
        return self.checked(first, rows)

    def checked(self, first: int, rows: int) -> list[LoopStep]:
        """The steps from `first` on. InvariantError if rows have ended."""
        if (least := min((step.rows for step in self.steps[first:]), default=rows)) < rows:
            raise InvariantError(
                f"{rows} rows were to generate throughout, and once only {least} did"
            )
        return self.steps[first:]


def random_ids(dice: np.random.Generator, vocab_size: int, count: int) -> array[int]:
    return array("i", dice.integers(0, vocab_size, count, np.int32).tobytes())


def intervals(steps: Sequence[LoopStep]) -> list[float]:
    """Seconds from each step to the next: the wait for a token of every row that generates in
    both."""
    return [after.at - before.at for before, after in pairwise(steps)]


# The commands.


def add_counts(parser: argparse.ArgumentParser, counts: Mapping[str, tuple[int, str]]) -> None:
    """--engine, --device and --kv-cache-dtype, and an option for each count: its default, and in
    words."""
    parser.add_argument(
        "--engine", required=True, type=Path, metavar="DIR", help="an engine directory"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="for the engine (default %(default)s)",
    )
    add_kv_cache_dtype(parser)
    for name, (default, words) in counts.items():
        parser.add_argument(
            flag(name),
            type=int,
            default=default,
            metavar="N",
            help=f"{words} (default %(default)s)",
        )


def check_context(longest: int, engine: Engine) -> None:
    if longest > engine.manifest.max_model_len:
        raise SettingError(
            "--history",
            f"contexts come to {longest} tokens, the model's to {engine.manifest.max_model_len}; "
            "take shorter "
            "ones, or build it with --set max_position_embeddings",
        )


def parts_type(
    parts: Sequence[str], needed: Mapping[str, str] | None = None
) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that lists some of the parts; returns them in their own order.
    `needed`: by part, another part."""

    def read(text: str) -> tuple[str, ...]:
        named = text.split(",")
        if not set(named) <= set(parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(parts)}")
        named += [also for part, also in (needed or {}).items() if part in named]
        return tuple(part for part in parts if part in named)

    return read


@contextmanager
def loaded(name: str, engine: Engine, config: SchedulerConfig) -> Iterator[Timed]:
    """A device with pools and a loaded engine, used by all executors that follow."""
    device = make_device(name)
    try:
        Executor(device, engine, config)
        gc.collect()
        gc.freeze()  # collections skip the engine, as in `pensieve serve`
        yield device
    finally:
        gc.unfreeze()
        device.end()


def show(
    bench: str, title: str, results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """A table of the rows for people, and all that was found as one line of JSON."""
    print(f"{title}\n{table(rows)}")
    print(json.dumps({"bench": bench, **results}), flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a column for each name that a row has. Numbers have four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_shown(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
