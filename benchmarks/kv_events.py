"""benchmarks.kv_events: what KV events cost the loop, and the publisher's thread.

The loop of `benchmarks.scheduler`, in which each step takes the device a fixed time, with and
without events in turn. Then the thread's time for one conversation of 23,040 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any, cast

import msgspec.msgpack

from pensieve.runtime.engine_session import EngineSession
from pensieve.runtime.executor import Executor
from pensieve.runtime.kv_events.blocks import Blocks
from pensieve.runtime.kv_events.config import KVEventsConfig
from pensieve.runtime.kv_events.publisher import KVEventPublisher
from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.chunk_keys import ChunkKeys
from pensieve.scheduler.kv.chunk_store import ChunkStore
from pensieve.scheduler.kv.noted_store import ContextRun, NotedStores, ResidencyChanges
from pensieve.scheduler.plan import StepPlan, StepResult
from pensieve.scheduler.types import DISK, GPU, HOST, ChunkKey

from .scheduler import CHUNK_TOKENS, FilledScheduler, SchedulerLoad

CHUNKS = 720
ANY_PORT = "tcp://127.0.0.1:0"


class PacedExecutor:
    """Results come after a fixed time a step."""

    def __init__(self, executor: Executor, step_s: float):
        self._executor = executor
        self._step_s = step_s
        self._ends: list[float] = []
        self._busy_until = 0.0

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        self._busy_until = max(time.monotonic(), self._busy_until) + self._step_s
        self._ends.append(self._busy_until)

    def done(self) -> bool:
        return not self._ends or time.monotonic() >= self._ends[0]

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self._ends.pop(0) - time.monotonic()))
        return self._executor.wait()


def session(load: SchedulerLoad, step_s: float, events: bool) -> EngineSession:
    """All slots are taken, and a long reply runs in nearly every seat."""
    stores = NotedStores()
    bench = FilledScheduler(load, make_store=stores if events else ChunkStore)
    bench.fill()
    bench.end_step()
    paced = cast(Executor, PacedExecutor(bench.executor, step_s))
    if not events:
        return EngineSession(bench.scheduler, paced)
    config = KVEventsConfig(True, endpoint=ANY_PORT, replay_endpoint=ANY_PORT)
    publisher = KVEventPublisher(config, stores.store, b"", CHUNK_TOKENS)
    return EngineSession(bench.scheduler, paced, report_kv=publisher.report)


def periods(load: SchedulerLoad, step_s: float, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds from one result to the next, the median of the rounds without and with events;
    the median of their ratios."""
    sessions = {events: session(load, step_s, events) for events in (False, True)}
    time.sleep(2.0)  # the thread tells all that the filling stored
    gc.collect()
    gc.freeze()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for events in (False, True) if number % 2 else (True, False):
            for _ in range(6):
                sessions[events].step()
            began = time.perf_counter()
            results = 0
            while results < steps:
                results += sessions[events].step() is not None
            taken[events].append((time.perf_counter() - began) / steps * 1e3)
    ratios = [on / off for off, on in zip(taken[False], taken[True], strict=True)]
    return {
        "rows": load.seats,
        "device_ms": step_s * 1e3,
        "off_ms": round(statistics.median(taken[False]), 4),
        "on_ms": round(statistics.median(taken[True]), 4),
        "ratio": round(statistics.median(ratios), 4),
    }


def thread_times() -> list[dict[str, Any]]:
    """The thread's milliseconds and a batch's bytes, the fastest of seven times."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(7):
        blocks = Blocks(b"", CHUNK_TOKENS)
        log = array("i", [random.randrange(100_000) for _ in range(CHUNKS * CHUNK_TOKENS)])
        keys: list[ChunkKey] = []
        ChunkKeys(b"", CHUNK_TOKENS, None).extend(keys, 0, b"", log, len(log))
        run = ContextRun(0, CHUNKS, keys, log, b"")
        for title, tiers, names in (
            ("all stored on the GPU", [(key, GPU) for key in keys], [run]),
            ("the first one goes to HOST", [(keys[0], HOST)], []),
            ("the next one goes to HOST", [(keys[1], HOST)], []),
            ("the first one goes to DISK", [(keys[0], DISK)], []),
            ("the first one is dropped", [(keys[0], NO_SLOT)], []),
        ):
            began = time.perf_counter()
            blocks.apply(ResidencyChanges(tiers, names))
            payload = msgspec.msgpack.encode([0.0, blocks.events(), 0])
            taken = (time.perf_counter() - began) * 1e3
            if title not in best or taken < best[title]["ms"]:
                best[title] = {"change": title, "ms": round(taken, 3), "bytes": len(payload)}
    return list(best.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kv_events", description="What KV events cost the loop and their thread."
    )
    parser.add_argument("--rows", type=int, default=64, help="default %(default)s")
    parser.add_argument(
        "--device-ms",
        type=float,
        nargs="+",
        default=[2.0, 8.0],
        metavar="MS",
        help="of each step (default 2 and 8)",
    )
    parser.add_argument("--rounds", type=int, default=24, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="default %(default)s")
    args = parser.parse_args(argv)
    load = SchedulerLoad(8_000, 24_000, args.rows)
    for device_ms in args.device_ms:
        print(json.dumps(periods(load, device_ms / 1e3, args.rounds, args.steps)))
    for line in thread_times():
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
