"""overflow_quality: what truncation costs a model, by the way in which its KV is treated then.

Held-out chats, one behind the other, are read in rows longer than the context. Perplexity is that of the tokens behind
the first truncation, with each way of `--overflow` (CachedAttention, USENIX ATC 2024, table 1). The engine computes
it, over one KV pool that keeps or forgets as the server's would.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ..plugins.torch_ops import register_pool, release_pool
from ..runtime.engine import Engine, open_engine
from ..scheduler.context_window import KEEP, OVERFLOW_MODES, RECOMPUTE, ContextWindow
from ..scheduler.types import SettingError
from .demo_data import END_OF_TEXT, Ids, read_chats, render, split

CHUNK_TOKENS = 32


def held_out_rows(path: Path, tokenizer: Tokenizer, length: int) -> list[Ids]:
    """The file's held-out chats one behind the other, cut into whole rows. SettingError if they do not fill one."""
    _, chats = split(list(read_chats(path)))
    encodings = tokenizer.encode_batch([render(chat) + END_OF_TEXT for chat in chats])
    flat = [token for encoding in encodings for token in encoding.ids]
    if len(flat) < length:
        raise SettingError("--steps", f"rows of {length} tokens are too long: {path} holds out {len(flat)}")
    return [flat[start : start + length] for start in range(0, len(flat) - length + 1, length)]


def stretches(windows: ContextWindow, count: int) -> Iterator[tuple[int, int]]:
    """Positions [start, end) that see from the same one on, up to `count`; the first ones see everything."""
    start, end = 0, windows.length
    while start < count:
        yield start, min(end, count)
        start, end = end, end + windows.step


class Reader:
    """One row at a time through the engine, over a pool that holds all of it."""

    def __init__(self, engine: Engine, tokens: int):
        chunks = -(-tokens // CHUNK_TOKENS)
        self._engine = engine
        self._pool = torch.zeros(engine.kv_shape(chunks, CHUNK_TOKENS), dtype=engine.dtype)
        self._table = torch.arange(chunks, dtype=torch.int32).view(1, -1)
        self._handle = register_pool(self._pool)

    def close(self) -> None:
        release_pool(self._handle)

    def loss(self, row: Ids, windows: ContextWindow) -> float:
        """Of the tokens whose predecessors see less than everything: the sum of their negative log probabilities."""
        total = 0.0
        for start, end in stretches(windows, len(row) - 1):
            seen = windows.start(start)
            begin = seen if windows.mode == RECOMPUTE else start
            logits = self._compute(row, begin, end, seen, windows.zero(seen))
            if seen:
                targets = torch.tensor(row[start + 1 : end + 1])
                total += F.cross_entropy(logits[start - begin :], targets, reduction="sum").item()
        return total

    def _compute(self, row: Ids, begin: int, end: int, seen: int, zero: int) -> Tensor:
        """Logits of positions [begin, end), which see from `seen` on; the model counts positions from `zero`."""
        places = torch.arange(begin, end, dtype=torch.int32)
        segments = torch.tensor([[0, end - begin, seen, end, 0]], dtype=torch.int32)
        ids, rows = torch.tensor(row[begin:end], dtype=torch.int32), places - begin
        return self._engine.forward(ids, places - zero, places, segments, self._table, rows, self._handle)


def perplexities(engine: Engine, rows: Sequence[Ids], length: int, step: int) -> dict[str, float]:
    """By the way of overflow; none that the engine's positions do not allow."""
    reader = Reader(engine, len(rows[0]))
    counted = len(rows) * (len(rows[0]) - 1 - length)
    result = {}
    for mode in OVERFLOW_MODES:
        if mode != KEEP or engine.manifest.decoder.rotary is not None:
            windows = ContextWindow(length, step, mode)
            result[mode] = math.exp(sum(reader.loss(row, windows) for row in rows) / counted)
    reader.close()
    return result


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="overflow_quality", description=__doc__.split("\n\n")[0])
    made.add_argument("--engine", required=True, type=Path, metavar="DIR", help="an engine directory, for the CPU")
    made.add_argument("--chats", required=True, type=Path, nargs="+", metavar="FILE", help="as train_demo takes them")
    made.add_argument("--max-model-len", type=int, nargs="+", default=[512, 1024, 2048], metavar="N",
                      help="contexts, whole chunks (default 512 1024 2048)")  # fmt: skip
    made.add_argument("--overflow-ratio", type=float, default=0.5, metavar="SHARE", help="(default %(default)s)")
    made.add_argument("--steps", type=int, default=4, help="truncations in a row of text (default %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        engine = open_engine(args.engine)
        tokenizer = Tokenizer.from_file(str(args.engine / "tokenizer.json"))
        for path in args.chats:
            for length in args.max_model_len:
                step = int(args.overflow_ratio * length) // CHUNK_TOKENS * CHUNK_TOKENS
                rows = held_out_rows(path, tokenizer, length + args.steps * step + 1)
                found = perplexities(engine, rows, length, step)
                tokens = len(rows) * args.steps * step
                report = {"chats": path.name, "context": length, "step": step, "tokens": tokens}
                print(json.dumps(report | {mode: round(value, 3) for mode, value in found.items()}), flush=True)
    except (SettingError, FileNotFoundError) as error:
        print(f"overflow_quality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
