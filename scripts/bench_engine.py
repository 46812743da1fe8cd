"""bench_engine: a compiled engine's forward pass beside the reference's, on the CPU, without the time of attention.

    python -m pensieve.scripts.bench_engine [--checkpoint DIR --dtype float32]

Both engines are built from the checkpoint (default: the demo model), opened, and run in turns over the same batches:
one new token a request, or one prompt. The time inside `write_kv` and `multi_token_attention`, which both call, is
taken off. Printed are medians, and the last line is JSON. With one thread it is the thread's own CPU time, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..builder.build import build_engine
from ..builder.checkpoint import DEMO_CHECKPOINT
from ..plugins import attention_reference
from ..plugins.torch_ops import register_pool
from ..runtime.engine import Engine, open_engine
from ..scheduler.types import SettingError

CHUNK = 32
CONTEXT = 128  # tokens of a row that generates: short, as the time of attention is taken off, not its noise
BATCHES = {  # requests, new tokens of each
    "1 row generates": (1, 1),
    "4 rows generate": (4, 1),
    "16 rows generate": (16, 1),
    "64 rows generate": (64, 1),
    "a prompt of 64": (1, 64),
    "a prompt of 512": (1, 512),
}
UNCOUNTED = 3


Clock = Callable[[], float]


class Spent:
    """Seconds of a clock inside the operations that every backend calls."""

    def __init__(self, clock: Clock) -> None:
        self.seconds, self.clock = 0.0, clock
        for name in ("write_kv", "multi_token_attention"):
            setattr(attention_reference, name, self._timed(getattr(attention_reference, name)))

    def _timed(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self.clock()
            result = operation(*arguments)
            self.seconds += self.clock() - start
            return result

        return timed


class Row(NamedTuple):
    """Milliseconds a step: outside attention, and all of it."""

    batch: str
    reference: float
    inductor: float
    reference_total: float
    inductor_total: float

    @property
    def ratio(self) -> float:
        return self.reference / self.inductor


def arguments(requests: int, new: int, vocab: int, context: int = CONTEXT) -> list[torch.Tensor]:
    """Of `Engine.forward` but the pool: each request computes the end of its context, and samples at the last."""
    context = max(context, new)
    blocks = -(-context // CHUNK)
    table = torch.arange(requests * blocks).view(requests, blocks)
    own = torch.arange(context - new, context).repeat(requests, 1)
    slots = table.gather(1, own // CHUNK) * CHUNK + own % CHUNK
    segments = torch.tensor([(seat * new, new, 0, context, seat) for seat in range(requests)])
    last = torch.arange(1, requests + 1) * new - 1
    ids = torch.randint(vocab, (requests * new,), generator=torch.Generator().manual_seed(0))
    return [part.int() for part in (ids, own.flatten(), slots.flatten(), segments, table, last)]


def measure(engines: Sequence[Engine], name: str, seconds: float, spent: Spent) -> Row:
    requests, new = BATCHES[name]
    manifest = engines[0].manifest
    batch = arguments(requests, new, manifest.vocab_size)
    slots = batch[4].numel()
    handle = register_pool(torch.zeros(engines[0].kv_shape(slots, CHUNK), dtype=engines[0].dtype))
    outside: list[list[float]] = [[], []]
    total: list[list[float]] = [[], []]
    deadline = time.perf_counter() + seconds
    while len(total[0]) < UNCOUNTED + 5 or time.perf_counter() < deadline:
        for engine, times, totals in zip(engines, outside, total, strict=True):
            spent.seconds = 0.0
            start = spent.clock()
            engine.forward(*batch, handle)
            took = spent.clock() - start
            totals.append(1e3 * took)
            times.append(1e3 * (took - spent.seconds))
    medians = [statistics.median(times[UNCOUNTED:]) for times in (*outside, *total)]
    return Row(name, *medians)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engine", description="a compiled forward pass beside the reference's")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, metavar="DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="a batch (default %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        try:
            engines = []
            for backend in ("reference", "inductor"):
                build_engine(args.checkpoint, Path(directory) / backend, backend, args.dtype)
                engines.append(open_engine(Path(directory) / backend))
        except SettingError as error:
            print(f"bench_engine: {error}", file=sys.stderr)
            return 2
        spent = Spent(time.thread_time if args.threads == 1 else time.perf_counter)
        rows = [measure(engines, name, args.seconds, spent) for name in BATCHES]
    print("| batch | reference, ms | inductor, ms | ratio | with attention: reference | inductor |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        numbers = (row.reference, row.inductor, row.ratio, row.reference_total, row.inductor_total)
        print(f"| {row.batch} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    print(json.dumps({"dtype": args.dtype, "threads": args.threads, "rows": [row._asdict() for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
