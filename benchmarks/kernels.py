"""Times the attention kernel on a GPU beside other ways to the same result.

    python -m benchmarks.kernels [--heads 40/10 ...] [--shapes decode ...] [--queries 1 2 4]
        [--flash-attention-3] [--plot FILE]
    python -m benchmarks.kernels --sharing

Ways: `ours`, over scattered chunks; `in a row`, ours in a graph of eight layers, per layer;
`contiguous`, PyTorch's FlashAttention-2 over KV that lies contiguous for free; `copy out`, the same
behind a copy out of the chunks; `one token`, one launch of our kernel that takes each query token
for a request of its own; `rounds`, where each request has the same few query tokens: one launch
after the other, for the first query token of each request, then the second; `fa3` and `fa3 in a
row`, with `--flash-attention-3`: FlashAttention-3 of SGLang's wheel, with our chunks as its pages.
Each is a captured graph, launched with a cold L2 and timed by events; the median counts. `error`
and `fa3 error` are relative differences from FlashAttention-2 and from ours. The last line is JSON.

`--sharing`: generating rows whose contexts begin with the same chunks, ours with stacks and
without, beside the time to read each chunk once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pensieve.plugins.attention import fp8_pool
from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention.work_list import Capacity, WorkList
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import add_kv_cache_dtype, exit_status, subplots

CHUNK, HEAD_DIM, LAYERS = 32, 128, 4
SCALE = HEAD_DIM**-0.5
HEADS = ("40/40", "40/10", "32/8")
UNCOUNTED = 3  # first times
MOST_ROUNDS = 32  # each round has a work list of its own
WIDEST = torch.complex128  # 16 bytes
OTHER_WAYS = ("contiguous", "copy out", "one token", "rounds")
FLASH_ATTENTION_3 = ("fa3", "fa3 in a row")


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Requests as (query tokens, context).

    shared   how many leading tokens all requests have in the same chunks
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    shared: int = 0

    @property
    def slots(self) -> int:
        """Chunks, each counted once."""
        repeated = (len(self.requests) - 1) * self.shared // CHUNK
        return sum(-(-context // CHUNK) for _, context in self.requests) - repeated

    @property
    def uniform(self) -> bool:
        return len(set(self.requests)) == 1


def _mixed() -> tuple[tuple[int, int], ...]:
    dice = random.Random(0)
    decode = [(1, dice.randint(200, 4000)) for _ in range(96)]
    return (*decode, *((dice.randint(16, 200), dice.randint(200, 4000)) for _ in range(16)))


SHAPES = (
    KernelShape("append 32 x 8 at 512", ((8, 512),) * 32),
    KernelShape("append 32 x 8 at 2048", ((8, 2048),) * 32),
    KernelShape("append 32 x 8 at 8192", ((8, 8192),) * 32),
    KernelShape("append 32 x 8 at 16384", ((8, 16384),) * 32),
    KernelShape("decode 64 at 2048", ((1, 2048),) * 64),
    KernelShape("decode 256 at 1024", ((1, 1024),) * 256),
    KernelShape("decode 1 at 16384", ((1, 16384),)),
    KernelShape("prefill 4 x 2048", ((2048, 2048),) * 4),
    KernelShape("prefill 512 at 8192", ((512, 8192),)),
    KernelShape("mixed 96 decode + 16 append", _mixed()),
)


def sharing_shape(rows: int, shared: int, context: int) -> KernelShape:
    """`rows` generating requests; the other two in units of 1,024 tokens."""
    return KernelShape(
        f"{rows} x {context}k share {shared}k", ((1, 1024 * context),) * rows, shared=1024 * shared
    )


# thousands of tokens, of a context
SHARED = ((4, 8), (4, 24), (15, 24), (16, 24), (4, 128), (16, 128), (64, 128))
SHARING = tuple(sharing_shape(rows, *tokens) for rows in (8, 16, 64) for tokens in SHARED)
SHARING_HEADS = (32, 8)  # of Llama-3-8B


def queries_shape(queries: int) -> KernelShape:
    """32 requests of that many query tokens at 8,192, a point of Pensieve's figure 12 with other
    query sizes."""
    return KernelShape(f"queries 32 x {queries} at 8192", ((queries, 8192),) * 32)


class Batch:
    """The tensors of one shape, whose chunks lie in random order in the first slots of a pool."""

    def __init__(self, shape: KernelShape, heads: int, pool: Tensor):
        device = pool.device
        self.shape = shape
        self.pool = pool
        blocks = [-(-context // CHUNK) for _, context in shape.requests]
        common = shape.shared // CHUNK
        own = [blocks[0], *(count - common for count in blocks[1:])]
        order = torch.randperm(shape.slots, device=device).int()
        self.block_table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=device)
        for seat, (count, end) in enumerate(zip(own, itertools.accumulate(own), strict=True)):
            self.block_table[seat, blocks[seat] - count : blocks[seat]] = order[end - count : end]
        self.block_table[1:, :common] = self.block_table[0, :common].clone()
        self.sharing = torch.full((len(blocks), 2), shape.shared, dtype=torch.int32, device=device)
        self.sharing[:, 0] = torch.arange(len(blocks))
        self.sharing[0, 1] = 0
        starts = [0, *itertools.accumulate(queries for queries, _ in shape.requests)]
        rows = [
            (at, n, 0, context, i)
            for i, (at, (n, context)) in enumerate(zip(starts, shape.requests, strict=False))
        ]
        single = [(at + j, 1, 0, end - n + j + 1, i) for at, n, _, end, i in rows for j in range(n)]
        self.segments, self.single = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, single)
        )
        queries = shape.requests[0][0]
        self.rounds = (
            [self.single[j::queries] for j in range(queries)]
            if shape.uniform and queries <= MOST_ROUNDS
            else []
        )
        self.q = torch.randn(starts[-1], heads, HEAD_DIM, device=device).to(torch.bfloat16)
        self.ends = [0, *itertools.accumulate(context for _, context in shape.requests)]
        self.starts = starts

    def work(self, segments: Tensor, sharing: Tensor | None = None) -> WorkList:
        capacity = Capacity(len(self.q), len(segments), int(segments[:, 3].max()))
        heads = self.q.shape[1]
        kv_heads = self.pool.shape[3]
        work = attention_kernel.make_work_list(
            capacity, heads, kv_heads, HEAD_DIM, self.q.dtype, pool=self.pool
        )
        generation = int(segments[:, 1].max()) == 1
        work.build(segments, 1 if generation else None, sharing)  # as the device does it
        return work

    def attend(self, work: WorkList, layer: int) -> Tensor:
        return attention_kernel.multi_token_attention(
            self.q, self.block_table, self.pool, layer, SCALE, work
        )

    def places(self) -> tuple[Tensor, Tensor]:
        """Slot and offset of every context's tokens, one behind the other."""
        device = self.pool.device
        contexts = [torch.arange(context, device=device) for _, context in self.shape.requests]
        slots = [self.block_table[i].long()[x // CHUNK] for i, x in enumerate(contexts)]
        return torch.cat(slots), torch.cat(contexts) % CHUNK

    def copied(self, places: tuple[Tensor, Tensor], layer: int) -> Tensor:
        """Keys and values out of the chunks: [tokens, 2, kv_heads, head_dim].

        The gather's time grows with its elements, so these are as wide as a thread can move.
        """
        words = self.pool.view(WIDEST)[places[0], layer, :, :, places[1]]
        return words.view(self.pool.dtype)

    def flash(self) -> Callable[[Tensor], Tensor]:
        """FlashAttention-2 over contiguous KV [tokens, 2, kv_heads, head_dim]."""
        queries, context = self.shape.requests[0]
        count = len(self.shape.requests)
        if self.shape.uniform:
            q = self.q.view(count, queries, *self.q.shape[1:]).transpose(1, 2)

            def uniform(kv: Tensor) -> Tensor:
                k, v = (x.view(count, context, *x.shape[1:]).transpose(1, 2) for x in kv.unbind(1))
                op = torch.ops.aten._scaled_dot_product_flash_attention
                return (
                    op(q, k, v, 0.0, queries > 1, scale=SCALE)[0]
                    .transpose(1, 2)
                    .reshape(self.q.shape)
                )

            return uniform
        device = self.pool.device
        ends = [torch.tensor(x, dtype=torch.int32, device=device) for x in (self.starts, self.ends)]
        most = [max(x) for x in zip(*self.shape.requests, strict=True)]

        def ragged(kv: Tensor) -> Tensor:
            op = torch.ops.aten._flash_attention_forward
            return op(self.q, *kv.unbind(1), *ends, *most, 0.0, True, False, scale=SCALE)[0]

        return ragged

    def flash_attention_3(self) -> Callable[[int], Tensor]:
        """FlashAttention-3 over the chunks of a layer, each of them a page. SettingError if it is
        not installed."""
        attend = imported_flash_attention_3()
        queries, contexts = zip(*self.shape.requests, strict=True)
        device = self.pool.device
        starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        lengths = torch.tensor(contexts, dtype=torch.int32, device=device)

        def paged(layer: int) -> Tensor:
            # [slots, kv_heads, tokens, head_dim] as [pages, tokens, kv_heads, head_dim]: a view
            keys, values = (x.transpose(1, 2) for x in self.pool[:, layer].unbind(1))
            return attend(
                self.q,
                keys,
                values,
                page_table=self.block_table,
                cache_seqlens=lengths,
                cu_seqlens_q=starts,
                max_seqlen_q=max(queries),
                softmax_scale=SCALE,
                causal=True,
            )

        return paged


def imported_flash_attention_3() -> Callable[..., Tensor]:
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise SettingError(
            "--flash-attention-3",
            f"needs SGLang's kernels: install sglang-kernel for this torch ({error})",
        ) from error
    return flash_attn_with_kvcache


def random_pool(slots: int, kv_heads: int, fp8: bool, layers: int = LAYERS) -> Tensor:
    """Normally distributed KV in bfloat16, or any codes and a scale of 1/256."""
    shape = (slots, layers, 2, kv_heads, CHUNK, HEAD_DIM)
    if not fp8:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    pool = torch.randint(0x7F, (*shape[:-1], HEAD_DIM + 1), dtype=fp8_pool.DTYPE, device="cuda")
    for layer in range(layers):
        fp8_pool.parts(pool, layer)[1].fill_(127 - 8)
    return pool


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a CUDA graph, which each call of the result launches."""
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # other threads, such as NCCL's, go on meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def median_seconds(
    work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Of one call of `work`. The time of `before`, called before each one, is not counted."""
    times = []
    for _ in range(UNCOUNTED + repeats):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in times[UNCOUNTED:])


def microseconds(run: Callable[[], object], flush: Tensor, repeats: int = 25) -> float:
    """Median time of one captured run, each with a cold L2; the launch itself hides behind the
    flush."""
    return 1e6 * median_seconds(captured(run), repeats, before=flush.zero_)


def ceilings(flush: Tensor) -> dict[str, float]:
    """Bandwidth of reading and writing, both counted, in TB/s and bf16 matrix rate in TFLOP/s, of
    this machine now."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy = microseconds(lambda: torch.add(source, 1.0, out=target), flush)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = microseconds(lambda: a @ b, flush)
    return {
        "copy_tb_s": 2 * source.nbytes / copy / 1e6,
        "matrix_tflop_s": 2 * 8192**3 / product / 1e6,
    }


def in_a_row(attend: Callable[[int], Tensor], flush: Tensor) -> float:
    """Microseconds of a layer, of eight one after the other."""
    return microseconds(lambda: [attend(i % LAYERS) for i in range(8)], flush, 9) / 8


def difference(result: Tensor, reference: Tensor) -> float:
    """Relative to the reference, root mean square."""
    reference = reference.float()
    return float((result.float() - reference).norm() / reference.norm())


def measure(batch: Batch, flush: Tensor, others: bool, flash_attention_3: bool) -> dict[str, float]:
    """Microseconds by way, and the differences of their results."""
    work = batch.work(batch.segments)
    ours = partial(batch.attend, work)
    times = {"ours": microseconds(lambda: ours(1), flush), "in a row": in_a_row(ours, flush)}
    if flash_attention_3:
        paged = batch.flash_attention_3()
        times["fa3 error"] = difference(paged(1), ours(1))
        times["fa3"] = microseconds(lambda: paged(1), flush)
        times["fa3 in a row"] = in_a_row(paged, flush)
    if others:
        flash = batch.flash()
        places = batch.places()
        kv = batch.copied(places, 1)
        times["error"] = difference(ours(1), flash(kv))
        times["contiguous"] = microseconds(lambda: flash(kv), flush)
        times["copy out"] = microseconds(lambda: flash(batch.copied(places, 1)), flush, 9)
        alone = batch.work(batch.single)
        times["one token"] = microseconds(lambda: batch.attend(alone, 1), flush, 9)
        if batch.rounds:
            rounds = [batch.work(segments) for segments in batch.rounds]
            times["rounds"] = microseconds(
                lambda: [batch.attend(work, 1) for work in rounds], flush, 9
            )
    return times


def measure_sharing(flush: Tensor, tb_s: float) -> list[dict]:
    """Prints and returns a row for each of SHARING. tb_s: bandwidth for the time to read each chunk
    once."""
    heads, kv_heads = SHARING_HEADS
    pool = random_pool(max(shape.slots for shape in SHARING), kv_heads, fp8=False, layers=1)
    print(
        "shape                   unique MB  roofline us  stacked  of roofline  alone  ratio  equal "
        "bits"
    )
    results = []
    for shape in SHARING:
        batch = Batch(shape, heads, pool)
        alone, stacked = (batch.work(batch.segments, sharing) for sharing in (None, batch.sharing))
        equal = torch.equal(batch.attend(alone, 0), batch.attend(stacked, 0))
        read = shape.slots * pool[0].nbytes
        roofline = read / tb_s / 1e6
        ours, before = (
            microseconds(partial(batch.attend, work, 0), flush) for work in (stacked, alone)
        )
        print(
            f"{shape.name:24} {read / 1e6:8.0f} {roofline:12.1f} {ours:8.1f} "
            f"{roofline / ours:12.2f} "
            f"{before:6.0f} {before / ours:6.2f}  {equal}",
            flush=True,
        )
        results.append(
            {
                "shape": shape.name,
                "roofline": roofline,
                "stacked": ours,
                "alone": before,
                "equal": equal,
            }
        )
    return results


def plot(results: list[dict], path: str) -> None:
    """Pensieve's figure 12: appending at growing contexts, by way."""
    figure, axes = subplots("--plot", 1, len(HEADS), figsize=(15, 4))
    for heads, axis in zip(HEADS, axes, strict=True):
        appends = [r for r in results if r["heads"] == heads and r["shape"].startswith("append")]
        for way in ("ours", *OTHER_WAYS, "fa3"):
            rows = [r for r in appends if way in r]
            axis.plot(
                [int(r["shape"].split()[-1]) for r in rows],
                [r[way] for r in rows],
                marker="o",
                label=way,
            )
        axis.set(
            title=f"{heads} heads",
            xlabel="context, tokens",
            ylabel="us",
            yscale="log",
            xscale="log",
        )
    axes[0].legend()
    figure.savefig(path)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels", description="times the attention kernel beside others"
    )
    parser.add_argument(
        "--heads", nargs="+", default=HEADS, choices=HEADS, help="query heads/key heads"
    )
    parser.add_argument(
        "--shapes", nargs="+", default=("",), help="shapes whose names contain one of these"
    )
    parser.add_argument(
        "--queries",
        nargs="+",
        type=int,
        default=(),
        help="also 32 requests of that many query tokens at 8,192",
    )
    parser.add_argument("--only-ours", action="store_true", help="leave the other ways out")
    parser.add_argument(
        "--flash-attention-3",
        action="store_true",
        help="time FlashAttention-3 too, with --only-ours as well; needs sglang-kernel",
    )
    add_kv_cache_dtype(parser)
    parser.add_argument(
        "--sharing", action="store_true", help="only rows that share chunks, heads 32/8"
    )
    parser.add_argument("--plot", help="file for the figure")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return exit_status("benchmarks.kernels", lambda: run(options))


def run(options: argparse.Namespace) -> None:
    fp8 = options.kv_cache_dtype != "auto"  # only for our kernel
    if options.flash_attention_3:
        if fp8 or options.sharing:
            raise SettingError(
                "--flash-attention-3", "has no rows with --sharing or --kv-cache-dtype fp8"
            )
        imported_flash_attention_3()  # before anything is measured
    torch.manual_seed(0)
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    limits = ceilings(flush)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **limits}
    print(
        f"{report['gpu']}: copy {limits['copy_tb_s']:.2f} TB/s, matrix "
        f"{limits['matrix_tflop_s']:.0f} TFLOP/s"
    )
    if options.sharing:
        print(json.dumps({**report, "sharing": measure_sharing(flush, limits["copy_tb_s"])}))
        return
    chosen = [shape for shape in SHAPES if any(part in shape.name for part in options.shapes)]
    chosen += map(queries_shape, options.queries)
    slots = max(shape.slots for shape in chosen)
    results = []
    ways = (*OTHER_WAYS, *FLASH_ATTENTION_3)
    columns = "".join(f"{way:>13}" for way in ways)
    print(f"{'shape':28} heads    ours  in a row  TB/s TFLOP/s {columns}    error")
    for heads in options.heads:
        q_heads, kv_heads = map(int, heads.split("/"))
        pool = random_pool(slots, kv_heads, fp8)
        for shape in chosen:
            row = {"shape": shape.name, "heads": heads}
            batch = Batch(shape, q_heads, pool)
            others = not (options.only_ours or fp8)
            row |= measure(batch, flush, others, options.flash_attention_3)
            read = (
                sum(context for _, context in shape.requests)
                * kv_heads
                * 2
                * pool.shape[5]
                * pool.element_size()
            )
            work = (
                sum(n * (context - (n - 1) / 2) for n, context in shape.requests)
                * q_heads
                * HEAD_DIM
                * 4
            )
            row |= {"tb_s": read / row["ours"] / 1e6, "tflop_s": work / row["ours"] / 1e6}
            times = "".join(f"{row.get(way, 0):13.0f}" for way in ways)
            print(
                f"{shape.name:28} {heads:6} {row['ours']:8.1f} "
                f"{row['in a row']:8.1f} {row['tb_s']:6.2f} {row['tflop_s']:7.0f} {times} "
                f"{row.get('error', 0):9.2g}",
                flush=True,
            )
            results.append(row)
        del pool
    if options.plot:
        plot(results, options.plot)
    print(json.dumps({**report, "results": results}))


if __name__ == "__main__":
    sys.exit(main())
