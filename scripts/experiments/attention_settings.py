"""Which tiles and splits read the KV of generating rows fastest: one run over candidates, for chats of middling length.

    python scripts/experiments/attention_settings.py [--seconds 200] [--json FILE]

Attention of rows that generate one token each, 40 query heads over 10 key heads of 128, bf16, contexts drawn from 1,100
to 1,300 tokens, chunks of 32 in random slots, all layers of a pool in one CUDA graph, so that the L2 holds nothing of
them. A setting is the shape of the smallest class of tiles (work_list.Tile) and how long splits are (SMALLEST_SPLIT,
TOKENS_PER_ROW). The first is the one in use; whatever differs from it by more than rounding is named and left out.

At 1,100 to 1,300 tokens a row is one split, so an item is one row and key head: 640 items of 64 rows for 396 programs
of the setting in use. What may cost there, and which settings would show it: the last wave (shorter splits, more
programs), a program's wait for its first tile (more programs, fewer stages), too little under way (more stages, wider
tiles), registers (fewer warps).

**The rule**: a setting replaces the one in use if it gains 3% at 32 to 128 rows and loses nothing at 16 rows, nor on
`pensieve bench_kernels`' decode shapes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from graph_times import microseconds  # beside this file
from torch import Tensor
from triton.errors import TritonError

from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import Capacity, Tile, WorkList

HEADS, KV_HEADS, HEAD_DIM, CHUNK = 40, 10, 128, 32
SHORTEST, LONGEST = 1100, 1300
ROWS = (64, 16, 32, 128, 48, 96)  # the most interesting first
POOL_BYTES = 4 * 2**30
ROUNDING = 2e-2
TB_S = 4.25  # the floor's


class Setting(NamedTuple):
    tile: Tile
    smallest_split: int = work_list.SMALLEST_SPLIT
    tokens_per_row: int = work_list.TOKENS_PER_ROW

    def __str__(self) -> str:
        tile = self.tile
        shape = f"{tile.keys} keys, {tile.warps} warps, {tile.stages} stages, {tile.programs} programs"
        return f"{shape}, {tile.registers or 'any'} registers, splits {self.smallest_split}"


IN_USE = attention_kernel.tiles_for(torch.bfloat16, HEADS, KV_HEADS, HEAD_DIM)
SETTINGS = (  # of all of them so many programs fit a multiprocessor of sm_90, in registers and in shared memory
    Setting(IN_USE[0]),
    Setting(IN_USE[0], 512, 128),
    Setting(IN_USE[0], 256, 64),
    Setting(Tile(16, 64, 4, 2, 3, 168)),
    Setting(Tile(16, 64, 4, 2, 4, 128)),
    Setting(Tile(16, 64, 4, 2, 4, 128), 512, 128),
    Setting(Tile(16, 64, 4, 3, 2)),
    Setting(Tile(16, 64, 4, 4, 2)),
    Setting(Tile(16, 64, 4, 4, 2), 512, 128),
    Setting(Tile(16, 64, 2, 3, 3)),
    Setting(Tile(16, 32, 4, 4, 4, 128)),
    Setting(Tile(16, 32, 4, 4, 4, 128), 512, 128),
    Setting(Tile(16, 32, 4, 6, 2)),
    Setting(Tile(16, 32, 2, 4, 4)),
    Setting(Tile(16, 32, 2, 4, 4), 512, 128),
    Setting(Tile(16, 32, 2, 3, 5, 168)),
    Setting(Tile(16, 128, 4, 2, 2)),
    Setting(Tile(16, 128, 8, 2, 2, 128)),
)


class Batch:
    """Rows of drawn contexts over chunks in random slots; the pool has as many layers as fill POOL_BYTES."""

    def __init__(self, rows: int):
        dice = torch.Generator().manual_seed(rows)
        contexts = torch.randint(SHORTEST, LONGEST + 1, (rows,), generator=dice)
        blocks = -(-LONGEST // CHUNK)
        slots = rows * blocks
        chunk_bytes = 2 * KV_HEADS * CHUNK * HEAD_DIM * 2
        self.layers = max(2, POOL_BYTES // (slots * chunk_bytes))
        shape = (slots, self.layers, 2, KV_HEADS, CHUNK, HEAD_DIM)
        self.pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.table = torch.randperm(slots, generator=dice).view(rows, blocks).int().cuda()
        seats = torch.arange(rows)
        parts = (seats, torch.ones(rows), torch.zeros(rows), contexts, seats)
        self.segments = torch.stack(parts, dim=1).int().cuda()
        self.q = torch.randn(rows, HEADS, HEAD_DIM, generator=dice).bfloat16().cuda()
        self.capacity = Capacity(rows, rows, blocks * CHUNK)
        self.bytes = int(contexts.sum()) * 2 * KV_HEADS * HEAD_DIM * 2  # of a layer

    def work(self, setting: Setting) -> WorkList:
        work_list.SMALLEST_SPLIT, work_list.TOKENS_PER_ROW = setting.smallest_split, setting.tokens_per_row
        tiles = (setting.tile, *IN_USE[1:])
        work = WorkList(self.capacity, HEADS, KV_HEADS, HEAD_DIM, tiles, "cuda")
        work.build(self.segments, longest=1)
        return work

    def attend(self, work: WorkList, layer: int) -> Tensor:
        scale = HEAD_DIM**-0.5
        return attention_kernel.multi_token_attention(self.q, self.table, self.pool, layer, scale, work)


def measure(rows: int, deadline: float) -> dict[str, float]:
    """Microseconds a layer of each setting; prints them."""
    batch = Batch(rows)
    expected: Tensor | None = None
    found: dict[str, float] = {}
    for setting in SETTINGS:
        if time.monotonic() > deadline:
            print("no time left for the rest")
            break
        try:
            work = batch.work(setting)
            result = batch.attend(work, 1).float()
            expected = result if expected is None else expected
            error = float((result - expected).norm() / expected.norm())
            if not error < ROUNDING:
                print(f"{setting} is WRONG by {error:.1e}")
                continue
            took = microseconds(
                lambda work=work: [batch.attend(work, layer) for layer in range(batch.layers)], batch.layers
            )
        except (TritonError, RuntimeError) as problem:
            print(f"{setting} does not run: {str(problem)[:160]}")
            continue
        found[str(setting)] = took
        gain = 1 - took / found[str(SETTINGS[0])]
        speed = batch.bytes / took / 1e6
        print(
            f"| {rows} | {setting} | {took:.1f} us | {speed:.2f} TB/s | {speed / TB_S:.0%} | {gain:+.1%} |", flush=True
        )
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="for all of it (default %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    print("| rows | setting | a layer | reads | of the floor's speed | gain |")
    results = {rows: measure(rows, deadline) for rows in ROWS}
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    if options.json is None:
        print(json.dumps(report))
    else:
        options.json.write_text(json.dumps(report, indent=1))
    for setting in map(str, SETTINGS[1:]):
        gains = [1 - found[setting] / found[str(SETTINGS[0])] for found in results.values() if setting in found]
        if len(gains) == len(ROWS):
            print(f"{setting}: " + ", ".join(f"{rows} {gain:+.1%}" for rows, gain in zip(ROWS, gains, strict=True)))


if __name__ == "__main__":
    main()
