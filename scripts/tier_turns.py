"""What `bench_tiers` measures: turns whose history is in one tier and in no other, put there on purpose."""

from __future__ import annotations

import os
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runtime.disk.segments import SystemCalls
from ..runtime.disk.store import DiskSettings
from ..runtime.engine import Engine
from ..runtime.executor import GROUP_LAYERS
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import CostProfile
from ..scheduler.types import InvariantError, RequestId, Usage
from .bench_loop import Loop, Timed, intervals

FOUND = 0.9  # of a history's tokens must have been where they were to be: a chunk or two may be shared with others


class MemoryDisk:
    """Answers in the system's place: what is written stays in memory and is read at `bytes_per_s`, as by one device
    that serves one call after the other."""

    def __init__(self) -> None:
        self.bytes_per_s = inf
        self.calls = SystemCalls(self._read, self._write, self._allocate)
        self._files: dict[int, np.ndarray] = {}  # by the file's number
        self._lock = threading.Lock()
        self._free_at = 0.0

    def _allocate(self, descriptor: int, offset: int, size: int) -> None:
        os.ftruncate(descriptor, offset + size)  # takes no room on the disk that the file is on
        self._files.setdefault(os.fstat(descriptor).st_ino, np.zeros(offset + size, np.uint8))

    def _write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._copy(descriptor, buffers, offset, lambda part, buffer: np.copyto(part, buffer))

    def _read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        began = time.perf_counter()
        done = self._copy(descriptor, buffers, offset, lambda part, buffer: np.copyto(buffer, part))
        with self._lock:
            self._free_at = free_at = max(self._free_at, began) + done / self.bytes_per_s
        time.sleep(max(0.0, free_at - time.perf_counter()))
        return done

    def _copy(
        self, descriptor: int, buffers: Sequence[Any], offset: int, copy: Callable[[np.ndarray, np.ndarray], None]
    ) -> int:
        content, end = self._files[os.fstat(descriptor).st_ino], offset
        for buffer in buffers:
            copy(content[end : end + len(buffer)], np.frombuffer(buffer, np.uint8))
            end += len(buffer)
        return end - offset


def always_load(cost: CostProfile) -> CostProfile:
    """As if computing took for ever."""
    return replace(cost, chunk_seconds=1e3)


def never_load(cost: CostProfile) -> CostProfile:
    """As if computing took no time."""
    return replace(cost, chunk_seconds=1e-9, attention=((1, 0.0),))


def as_measured(cost: CostProfile) -> CostProfile:
    return cost


BELIEFS: Mapping[str, Callable[[CostProfile], CostProfile]] = {
    "load": always_load,
    "recompute": never_load,
    "chosen": as_measured,
}
"""How a scheduler is made to go one way at any price."""


class Disk(NamedTuple):
    """Where files of KV are, and who answers for the system."""

    directory: Path
    calls: SystemCalls = SystemCalls()


class Turn(NamedTuple):
    """Seconds to a turn's first token, and where its prompt came from."""

    seconds: float
    usage: Usage


def quickest(turns: Sequence[Turn]) -> float:
    """Seconds of the quickest turn but the first: whoever else uses the machine only adds time."""
    return min(turn.seconds for turn in turns[1:])


def ask(loop: Loop, prompt: array[int], tier: str | None, tokens: int) -> Turn:
    """Alone. InvariantError if not almost `tokens` of the prompt's tokens came from there (a name in `Usage`)."""
    loop.drain()
    started = time.perf_counter()
    request = loop.add(prompt, 1)
    loop.run_until(lambda: request in loop.begun)
    at, usage = loop.begun[request]
    if tier is not None and getattr(usage, tier) < FOUND * tokens:
        raise InvariantError(f"{tokens} tokens were to be found as {tier!r}, but the prompt had {usage}")
    return Turn(at - started, usage)


class Load(NamedTuple):
    """`turns` first turns of conversations, `rows` at a time: tokens of a prompt, and of a reply."""

    turns: int
    rows: int
    prompt: int
    reply: int


@dataclass(frozen=True)
class Tiers:
    """One device and engine, and the caches for turns: the GPU's holds one history and what is new, HOST all of them.

    histories     token ids, whole chunks of them, one history a turn: the first one warms up
    """

    device: Timed
    engine: Engine
    config: SchedulerConfig
    cost: CostProfile
    histories: Sequence[array[int]]

    @property
    def tokens(self) -> int:
        """Of a history: whole chunks."""
        return len(self.histories[0])

    @contextmanager
    def loop(
        self, cost: CostProfile, disk: Disk | None = None, group_layers: int = GROUP_LAYERS, **how: Any
    ) -> Iterator[Loop]:
        """disk: with this one, and what earlier loops have left there; how: as `SchedulerConfig` has it."""
        settings, slots = None, self.config.disk_kv_chunks if disk else 0
        if disk is not None:
            settings = DiskSettings(disk.directory, slots, self.engine.manifest.fingerprint, system=disk.calls)
        config = replace(self.config, disk_kv_chunks=slots, **how)
        loop = Loop(self.device, self.engine, config, cost, group_layers, settings)
        try:
            yield loop
        finally:
            loop.close()

    def fill(self, loop: Loop) -> None:
        """Computes all histories, one after the other."""
        for history in self.histories:
            loop.add(history, 1)
            loop.drain()

    def recomputed(self, new: int) -> float:
        """Seconds to the first token with nothing reused."""
        with self.loop(self.cost, reuse=False) as loop:
            turns = [ask(loop, history + loop.random_ids(new), "new", self.tokens) for history in self.histories]
        return quickest(turns)

    def from_memory(self, news: Sequence[int], group_layers: int = GROUP_LAYERS) -> list[dict[str, float]]:
        """Seconds to the first token by how many tokens are new, with the history on HOST alone and on the GPU."""
        found = []
        with self.loop(always_load(self.cost), group_layers=group_layers) as loop:
            self.fill(loop)
            for new in news:
                turns = [self._from_memory(loop, history, new) for history in self.histories]
                host, gpu = (quickest(tier) for tier in zip(*turns, strict=True))
                found.append({"new_tokens": new, "host_s": host, "gpu_s": gpu})
        return found

    def _from_memory(self, loop: Loop, history: array[int], new: int) -> tuple[Turn, Turn]:
        host = ask(loop, history + loop.random_ids(new), "host", self.tokens)
        return host, ask(loop, history + loop.random_ids(new), "gpu", self.tokens)

    def write(self, disk: Disk) -> None:
        """All histories are in the files of that disk from here on, and nowhere else."""
        with self.loop(self.cost, disk, save="async") as loop:
            self.fill(loop)

    def from_disk(self, disk: Disk, cost: CostProfile, belief: str, new: int) -> tuple[float, float]:
        """Seconds to the first token, and which share of the history was read. Before, it is on DISK and nowhere else.

        `cost` says how fast the disk is.
        """
        tier = {"load": "disk", "recompute": "recomputed", "chosen": None}[belief]
        with self.loop(BELIEFS[belief](cost), disk, save="off", prefetch=False) as loop:
            turns = [ask(loop, history + loop.random_ids(new), tier, self.tokens) for history in self.histories]
        read = statistics.mean(turn.usage.disk for turn in turns[1:]) / self.tokens
        return quickest(turns), read

    def saving(self, disk: Disk, gpu_kv_chunks: int, save: str, load: Load) -> dict[str, float]:
        """Turns whose KV is saved in that way:

        seconds            until the last turn's end was told
        tokens_per_s       of prompts and replies
        first_token_s, turn_s
                           medians, from a turn's beginning
        between_tokens_p99_s
                           of rows that generate
        until_saved_s      from the last turn's end until all that is to be saved is on DISK
        saved              chunks
        """
        with self.loop(self.cost, disk, save=save, gpu_kv_chunks=gpu_kv_chunks) as loop:
            began: dict[RequestId, float] = {}
            while len(loop.ended) < load.turns:
                while len(began) < load.turns and len(began) - len(loop.ended) < load.rows:
                    at = time.perf_counter()
                    began[loop.add(loop.random_ids(load.prompt), load.reply)] = at
                loop.step()
            start, last = min(began.values()), max(loop.ended.values())
            between = intervals(loop.steps)
            loop.drain()
            return {
                "seconds": last - start,
                "tokens_per_s": load.turns * (load.prompt + load.reply) / (last - start),
                "first_token_s": statistics.median(loop.begun[turn][0] - at for turn, at in began.items()),
                "turn_s": statistics.median(loop.ended[turn] - at for turn, at in began.items()),
                "between_tokens_p99_s": float(np.percentile(between, 99)),
                "until_saved_s": time.perf_counter() - last,
                "saved": loop.scheduler.stats().spilled,
            }
