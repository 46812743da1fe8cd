"""check.quality: measures the error of changed KV: a history in eight bits, or a truncated context.

    python -m benchmarks.check.quality fp8 --chats FILE ...
    python -m benchmarks.check.quality overflow --engine DIR --chats FILE ...

fp8: the error of `--lower-tier-kv fp8` after a history returns from the lower tier. In each chat,
everything before the last user's message is history: its whole chunks are encoded and decoded once,
as by a swap-out and a swap-in. Then the last message and its reply are computed, known token by
known token, and a reply is generated, with the original and with the decoded history. The second is
compared with the first. For scale, so is the same engine in bfloat16, without coding; and the
engine with `--kv-cache-dtype fp8`, whose whole context is in eight bits. On the CPU, in float32;
prints a table and one line of JSON.

overflow: held-out chats, one after the other, are read in rows longer than the context. The
perplexity is that of the tokens after the first truncation, with each mode of `--overflow`
(CachedAttention, USENIX ATC 2024, table 1). The engine computes it with one KV pool, which keeps or
drops KV like the server's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.forward_batch import ForwardBatch
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.plugins.kv_forms.forms import FP8, Form
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.engine import Engine, open_engine
from pensieve.scheduler.context_window import KEEP, OVERFLOW_MODES, RECOMPUTE, ContextWindow
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

from ..demo_model.data import END_OF_TEXT, TURN_START, Ids, read_chats, render, split

if TYPE_CHECKING:
    from pensieve.plugins.attention.work_list import WorkList  # only for CUDA

OPT_CHECKPOINT = Path(__file__).parents[2] / "tests" / "demo_models" / "opt"
CHUNK = 32
LEAST_CHUNKS = 2  # of a history

RESTART = "restart-positions"
"""A way that no server has: KV is kept, and the model counts positions from each window's start.
That is wrong."""


class QualityTurn(NamedTuple):
    """Token ids: the history and the last message with the beginning of the reply, and the reply
    itself. `history` is the number of the history's tokens."""

    history: int
    prompt: list[int]
    reply: list[int]


class QualityWay(NamedTuple):
    """How a turn is computed: by this engine, with the history in that form (None: as computed)."""

    name: str
    engine: Engine
    form: Form | None = None


@dataclass
class Quality:
    """Sums over turns of one kind of computation, compared with the exact history in float32.

    equal_tokens: tokens of greedy replies before the first difference.
    """

    model: str
    way: str
    turns: int = 0
    tokens: int = 0
    loss: float = 0.0
    agreed: int = 0
    divergence: float = 0.0
    squared_error: float = 0.0
    squared_logits: float = 0.0
    equal_replies: int = 0
    equal_tokens: int = 0
    reply_tokens: int = 0

    def compare(self, got: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Logits [n, vocab] of the n known tokens `targets`."""
        self.turns += 1
        self.tokens += len(targets)
        self.loss += F.cross_entropy(got, targets, reduction="sum").item()
        self.agreed += int((got.argmax(-1) == exact.argmax(-1)).sum())
        self.divergence += F.kl_div(got.log_softmax(-1), exact.softmax(-1), reduction="sum").item()
        # A constant added to all logits of a token changes nothing.
        got = got - got.mean(-1, keepdim=True)
        exact = exact - exact.mean(-1, keepdim=True)
        self.squared_error += (got - exact).square().sum().item()
        self.squared_logits += exact.square().sum().item()

    def compare_replies(self, got: list[int], exact: list[int]) -> None:
        same = [a == b for a, b in zip(got, exact, strict=False)]
        self.equal_replies += got == exact
        self.equal_tokens += same.index(False) if False in same else len(same)
        self.reply_tokens += len(exact)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.tokens)

    def row(self) -> str:
        return (
            f"| {self.model} | {self.way} | "
            f"{math.sqrt(self.squared_error / self.squared_logits):.2%} "
            f"| {abs(self.divergence) / self.tokens:.5f} | {self.perplexity:.4f} | "
            f"{self.agreed / self.tokens:.2%} "
            f"| {self.equal_replies} of {self.turns} ({self.equal_tokens / self.reply_tokens:.0%} "
            "of tokens) |"
        )


HEADER = (
    "| model | history | error of logits | KL divergence, nats | perplexity | greedy agreement "
    "| equal replies |\n|---|---|---|---|---|---|---|"
)


class Context:
    """One request's KV on an engine, in the slots 0, 1, 2 ... of its own pool."""

    def __init__(self, engine: Engine, tokens: int):
        self._engine = engine
        self.pool = torch.zeros(
            engine.kv_shape(-(-tokens // CHUNK), CHUNK),
            dtype=engine.kv_dtype,
            device=engine.manifest.device,
        )
        self._table = torch.arange(len(self.pool), dtype=torch.int32).view(1, -1)

    def compute(
        self, tokens: Sequence[int], start: int, seen: int = 0, zero: int = 0, scored: int = 0
    ) -> Tensor:
        """Returns logits [n, vocab] of the next token after each of `tokens` but the first `scored`
        ones. The tokens are at `start` and on and see from `seen` on; the model counts positions
        from `zero`."""
        count = len(tokens)
        piece = SeatSpan(0, start, start + count)
        rows = torch.arange(scored, count)
        batch = batch_of([piece], torch.tensor(tokens), self._table, rows, CHUNK)
        batch.positions.sub_(zero)
        batch.segments[:, 2] = seen
        batch = batch.map(lambda part: part.to(self.pool.device))
        handle = register_pool(self.pool, work=self._work(batch))
        try:
            return self._engine.forward(batch, handle)
        finally:
            release_pool(handle)

    def _work(self, batch: ForwardBatch) -> WorkList | None:
        """The work list that attention on a GPU reads."""
        if not self.pool.is_cuda:
            return None
        # imported here because only CUDA installations have Triton
        from pensieve.plugins.attention.kernel import make_work_list
        from pensieve.plugins.attention.work_list import Capacity

        config = self._engine.manifest.decoder
        work = make_work_list(
            Capacity(len(batch.token_ids), 1, len(self.pool) * CHUNK),
            config.heads,
            config.kv_heads,
            config.head_dim,
            self._engine.dtype,
            pool=self.pool,
        )
        work.build(batch.segments)
        return work

    def copied(self, chunks: int, form: Form | None = None) -> Context:
        """A copy; its first `chunks` chunks have passed through a lower tier in that form. A chunk
        that the form cannot hold exactly stays as it was, because a server does not use such a
        copy."""
        other = Context(self._engine, self.pool.shape[0] * CHUNK)
        other.pool.copy_(self.pool)
        if form is not None:
            shape = tuple(self.pool.shape)
            records = form.encode(self.pool[:chunks])
            decoded = form.decode(records, shape, self.pool.dtype)
            for slot, record in enumerate(records.cpu()):
                if form.is_exact is None or form.is_exact(record.flatten().numpy(), shape):
                    other.pool[slot] = decoded[slot]
        return other

    def reply(self, prompt: list[int], start: int, most: int) -> list[int]:
        """A greedy reply to the prompt, whose KV before `start` is already computed."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + most:
            logits = self.compute(tokens[start:], start)[-1]
            start = len(tokens)
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self._engine.manifest.stop_ids:
                break
        return tokens[len(prompt) :]


def read_turns(
    files: list[Path], tokenizer: Tokenizer, longest: int, most: int
) -> list[QualityTurn]:
    """The last turns of held-out chats (`demo_model.data.split`) that end with a reply and whose
    context fits."""
    turns = []
    for path in files:
        _, chats = split(list(read_chats(path)))
        for chat in chats:
            while chat and chat[-1]["role"] != "assistant":
                chat = chat[:-1]
            texts = (
                render(chat[:-2]),
                render(chat[:-1]) + f"{TURN_START}assistant\n",
                render(chat),
            )
            history, prompt, whole = (tokenizer.encode(text).ids for text in texts)
            if len(history) >= LEAST_CHUNKS * CHUNK and len(whole) <= longest:
                turns.append(
                    QualityTurn(len(history) // CHUNK * CHUNK, prompt, whole[len(prompt) :])
                )
    return turns[:: max(1, len(turns) // most)][:most]


def measure(
    model: str,
    ways: Sequence[QualityWay],
    turns: Iterable[QualityTurn],
    most: int,
    replies_only: bool = False,
) -> list[Quality]:
    """Compares each way with the first one; uses at most `most` tokens of each turn's reply.

    replies_only: known tokens are those of the reply; otherwise also those of the last message.
    """
    results = [Quality(model, way.name) for way in ways]
    for turn in turns:
        tokens = [*turn.prompt, *turn.reply]
        start = turn.history
        first = len(turn.prompt) - 1 if replies_only else start
        targets = torch.tensor(tokens[first + 1 :])
        histories: dict[int, Context] = {}
        exact: tuple[Tensor, list[int]] | None = None
        for way, result in zip(ways, results, strict=True):
            history = histories.get(id(way.engine))
            if history is None:
                history = histories[id(way.engine)] = Context(way.engine, len(tokens) + most)
                history.compute(tokens[:start], 0, scored=start - 1)
            context = history.copied(start // CHUNK, way.form)
            logits = context.compute(tokens[start:-1], start, scored=first - start).cpu()
            reply = context.reply(turn.prompt, start, most)
            exact = exact or (logits, reply)
            result.compare(logits, exact[0], targets)
            result.compare_replies(reply, exact[1])
    return results


def measure_fp8(args: argparse.Namespace) -> None:
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for checkpoint in args.checkpoints:
            engines = []
            for dtype in ("float32", "bfloat16"):
                built = Path(directory) / f"{checkpoint.name}-{dtype}"
                build_engine(checkpoint, built, dtype=dtype)
                engines.append(open_engine(built))
            exact, half = engines
            everywhere = open_engine(
                Path(directory) / f"{checkpoint.name}-float32", kv_cache_dtype="fp8"
            )
            tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
            longest = exact.manifest.max_model_len - args.reply_tokens
            turns = read_turns(args.chats, tokenizer, longest, args.turns)
            ways = (
                QualityWay("exact", exact),
                QualityWay("fp8", exact, FP8),
                QualityWay("exact, bfloat16", half),
                QualityWay("fp8 on every tier", everywhere),
            )
            results += measure(checkpoint.name, ways, turns, args.reply_tokens)
    print(HEADER)
    for result in results:
        print(result.row())
    print(json.dumps([asdict(result) for result in results]))


# Truncation.


def held_out_rows(path: Path, tokenizer: Tokenizer, length: int) -> list[Ids]:
    """The file's held-out chats, joined and cut into whole rows. SettingError if they do not fill
    one."""
    _, chats = split(list(read_chats(path)))
    encodings = tokenizer.encode_batch([render(chat) + END_OF_TEXT for chat in chats])
    flat = [token for encoding in encodings for token in encoding.ids]
    if len(flat) < length:
        raise SettingError(
            "--steps", f"rows of {length} tokens are too long: {path} holds out {len(flat)}"
        )
    return [flat[start : start + length] for start in range(0, len(flat) - length + 1, length)]


def stretches(windows: ContextWindow, count: int) -> Iterator[tuple[int, int]]:
    """Ranges of positions [start, end) that see from the same position on, up to `count`; the first
    range sees everything."""
    start = 0
    end = windows.length
    while start < count:
        yield start, min(end, count)
        start = end
        end = end + windows.step


def truncated_logits(
    context: Context, row: Ids, windows: ContextWindow
) -> Iterator[tuple[int, Tensor]]:
    """Yields (start, logits [n, vocab]) of the n positions from `start` on, for those positions
    that do not see the whole context."""
    for start, end in stretches(windows, len(row) - 1):
        seen = windows.start(start)
        begin = seen if windows.mode == RECOMPUTE else start
        tokens = row[begin:end]
        logits = context.compute(tokens, begin, seen, windows.zero(seen), scored=start - begin)
        if seen:
            yield start, logits


def truncated_loss(context: Context, row: Ids, windows: ContextWindow) -> float:
    """The sum of the negative log probabilities of the tokens whose predecessors do not see the
    whole context."""
    total = 0.0
    for start, logits in truncated_logits(context, row, windows):
        targets = torch.tensor(row[start + 1 : start + 1 + len(logits)])
        total += F.cross_entropy(logits, targets.to(logits.device), reduction="sum").item()
    return total


def perplexities(engine: Engine, rows: Sequence[Ids], length: int, step: int) -> dict[str, float]:
    """Perplexities by overflow mode, and of RESTART; modes that the engine's positions do not allow
    are left out."""
    context = Context(engine, len(rows[0]))
    counted = len(rows) * (len(rows[0]) - 1 - length)
    result = {}
    for mode in (*OVERFLOW_MODES, RESTART):
        if mode != KEEP or engine.manifest.decoder.rotary is not None:
            windows = ContextWindow(length, step, mode)
            result[mode] = math.exp(
                sum(truncated_loss(context, row, windows) for row in rows) / counted
            )
    return result


def measure_overflow(args: argparse.Namespace) -> None:
    engine = open_engine(args.engine)
    tokenizer = Tokenizer.from_file(str(args.engine / "tokenizer.json"))
    for path in args.chats:
        for length in args.max_model_len:
            step = int(args.overflow_ratio * length) // CHUNK * CHUNK
            rows = held_out_rows(path, tokenizer, length + args.steps * step + 1)
            by_mode = perplexities(engine, rows, length, step)
            tokens = len(rows) * args.steps * step
            report = {"chats": path.name, "context": length, "step": step, "tokens": tokens}
            print(
                json.dumps(report | {mode: round(value, 3) for mode, value in by_mode.items()}),
                flush=True,
            )


# The command.


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check.quality", description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    option = parts.add_parser("fp8", help="histories that come back in eight bits").add_argument
    option(
        "--chats",
        required=True,
        type=Path,
        nargs="+",
        metavar="FILE",
        help="as for demo_model.train, which leaves out the chats that are used here",
    )
    option(
        "--checkpoints",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="with the demo models' tokenizer (default: both)",
        default=[DEMO_CHECKPOINT, OPT_CHECKPOINT],
    )
    option("--turns", type=int, default=60, metavar="N", help="at most (default %(default)s)")
    option(
        "--reply-tokens",
        type=int,
        default=100,
        metavar="N",
        help="of a greedy reply (default %(default)s)",
    )
    option = parts.add_parser("overflow", help="contexts that are truncated").add_argument
    option(
        "--engine", required=True, type=Path, metavar="DIR", help="an engine directory, for the CPU"
    )
    option(
        "--chats",
        required=True,
        type=Path,
        nargs="+",
        metavar="FILE",
        help="as demo_model.train takes them",
    )
    option("--max-model-len", type=int, nargs="+", default=[512, 1024, 2048], metavar="N",
           help="contexts, whole chunks (default 512 1024 2048)")  # fmt: skip
    option(
        "--overflow-ratio", type=float, default=0.5, metavar="SHARE", help="(default %(default)s)"
    )
    option(
        "--steps", type=int, default=4, help="truncations in a row of text (default %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    work = measure_fp8 if args.part == "fp8" else measure_overflow
    return exit_status("check.quality", lambda: work(args), (SettingError, OSError))


if __name__ == "__main__":
    sys.exit(main())
