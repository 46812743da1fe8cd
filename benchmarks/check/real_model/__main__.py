"""check.real_model: a real chat model on real conversations, beside transformers.

    python -m benchmarks.check.real_model all --checkpoint PATH --data DIR --output DIR

    exactness   greedy replies in float32 equal those of transformers, with each turn's history
                from the GPU, HOST, DISK, or recomputed
    losses      perplexity and greedy choices with KV and weights in fewer bits
    overflow    perplexity and greedy choices of contexts that overflow
    lookup      prompt lookup: accepted drafts and speed
    gaps        log probabilities of bfloat16 runs against float32's

PATH is a checkpoint that transformers can read. DIR has `mtbench101_text.jsonl.gz`,
`tau_airline_text.jsonl.gz` and `miniswe_text.jsonl.gz`, one conversation a line. Each part writes
PART.json and PART.md into the output directory. Exit status 1: a reply differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from pensieve.builder.engine_cache import engine_for
from pensieve.runtime.engine import open_engine
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.declaration import flag
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import check_least, exit_status

from ...loop import table
from .conversations import AGENTS, KINDS, SERVICE, ChatText, mixed, read_conversations
from .exactness import TIE, measure_exactness
from .gaps import measure_gaps, play_scored
from .lookup import lookup_prompts, measure_lookup
from .losses import (
    measure_fewer_bits,
    measure_overflow,
    overflow_rows,
    quality_rows,
    quality_turns,
)
from .play import PlayLimits
from .reference import TransformersReference

PLAYED = ("exactness", "gaps")
COUNTS = {
    "conversations": ((*PLAYED, "losses"), 10, 200, "three short chats for each service agent's"),
    "turns": (PLAYED, 3, 10, "most turns of a conversation"),
    "reply_tokens": ((*PLAYED, "losses"), 16, 48, "most tokens of the model's replies"),
    "rows": ((*PLAYED, "lookup"), 8, 64, "most requests at once"),
    "context": ((*PLAYED, "losses", "lookup"), 2048, 8000, "most tokens of a context"),
    "scored_turns": (("losses",), 10, 60, "last turns of conversations"),
    "scored_tokens": (("losses",), 64, 256, "most tokens of a recorded reply"),
    "overflow_context": (("overflow",), 1024, 1024, "tokens that the model may see"),
    "overflow_steps": (("overflow",), 2, 4, "truncations in a text, each of half that context"),
    "overflow_texts": (("overflow",), 2, 16, "texts of each kind"),
    "lookup_conversations": (("lookup",), 3, 16, "conversations of each kind"),
    "lookup_tokens": (("lookup",), 48, 256, "most tokens of a reply"),
}
"""Options: the parts that read them, the defaults for a CPU and for a GPU, and in words."""


class PartResult(NamedTuple):
    """Tables by title, remarks below them, and whether the part's claim is true."""

    tables: dict[str, list[dict[str, Any]]]
    remarks: list[str]
    passed: bool = True


class Setting(NamedTuple):
    """The options of a run."""

    args: argparse.Namespace
    text: ChatText

    def limits(self, context: int, rows: int) -> PlayLimits:
        args = self.args
        batch = 4096 if args.device == "cuda" else 512
        return PlayLimits(args.turns, args.reply_tokens, context, rows, batch)

    def engine(self, dtype: str) -> Any:
        args = self.args
        return open_engine(
            engine_for(args.checkpoint, dtype=dtype, device=args.device), args.device
        )


def exactness(setting: Setting) -> PartResult:
    args = setting.args
    conversations = mixed(args.data, args.conversations)
    limits = setting.limits(args.context, args.rows)
    reference = TransformersReference(args.checkpoint, args.device)
    rows, passed = measure_exactness(
        setting.engine("float32"), setting.text, conversations, limits, reference
    )
    remark = (
        f"{'PASS' if passed else 'FAIL'}: {len(conversations)} conversations; ties are tokens less "
        f"than {TIE} below the reference's best logit. Columns gpu to new are prompt tokens."
    )
    return PartResult({"Replies by where the history comes from": rows}, [remark], passed)


def losses(setting: Setting) -> PartResult:
    args = setting.args
    conversations = mixed(args.data, args.conversations)
    turns = quality_turns(setting.text, conversations, args.context, args.scored_tokens)
    # evenly, so that both kinds are among them
    turns = turns[:: max(1, len(turns) // args.scored_turns)][: args.scored_turns]
    rows, left_out = measure_fewer_bits(args.checkpoint, args.device, turns, args.reply_tokens)
    remarks = [f"{len(turns)} turns.", *(f"Left out: {reason}." for reason in left_out)]
    return PartResult({"KV and weights in fewer bits": rows}, remarks)


def overflow(setting: Setting) -> PartResult:
    args = setting.args
    length = args.overflow_context
    step = length // 2
    texts = [
        text
        for kind in (SERVICE, AGENTS)
        for text in overflow_rows(
            setting.text,
            read_conversations(args.data, kind, 200),
            length + args.overflow_steps * step + 1,
            args.overflow_texts,
        )
    ]
    if not texts:
        raise SettingError("--overflow-context", "no conversation is long enough; take less")
    results = measure_overflow(setting.engine("float32"), texts, length, step)
    title = f"Contexts that overflow {length} tokens"
    remark = f"{len(texts)} texts of {length + args.overflow_steps * step} tokens."
    return PartResult({title: quality_rows(results)}, [remark])


def lookup(setting: Setting) -> PartResult:
    args = setting.args
    dtype = args.lookup_dtype or ("bfloat16" if args.device == "cuda" else "float32")
    engine = setting.engine(dtype)
    rows: list[dict[str, Any]] = []
    remarks = []
    for kind in KINDS:
        conversations = read_conversations(args.data, kind, args.lookup_conversations)
        longest = args.context - args.lookup_tokens
        prompts = lookup_prompts(setting.text, conversations, longest)
        if not prompts:
            remarks.append(f"Left out: {kind} has no prompt of at most {longest} tokens.")
            continue
        limits = setting.limits(args.context, min(args.rows, len(prompts)))
        limits = replace(limits, reply_tokens=args.lookup_tokens)
        rows += measure_lookup(engine, kind, prompts, limits)
    return PartResult({f"Prompt lookup, {dtype}": rows}, remarks)


def gaps(setting: Setting) -> PartResult:
    args = setting.args
    conversations = mixed(args.data, args.conversations)
    limits = setting.limits(args.context, args.rows)
    by_way = play_scored(setting.engine("bfloat16"), setting.text, conversations, limits)
    exact = TransformersReference(args.checkpoint, args.device)
    half = TransformersReference(args.checkpoint, args.device, torch.bfloat16)
    title = "Log probabilities of bfloat16, absolute differences from float32"
    return PartResult({title: measure_gaps(by_way, exact, half)}, [])


PARTS: dict[str, Callable[[Setting], PartResult]] = {
    "exactness": exactness,
    "losses": losses,
    "overflow": overflow,
    "lookup": lookup,
    "gaps": gaps,
}


# The command.


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="check.real_model", description=__doc__.partition("\n")[0]
    )
    option = parser.add_argument
    option("parts", nargs="+", choices=[*PARTS, "all"], metavar="PART",
           help=f"{', '.join(PARTS)}, or all")  # fmt: skip
    option("--checkpoint", required=True, type=Path, metavar="PATH", help="a chat model")
    option("--data", required=True, type=Path, metavar="DIR", help="real conversations")
    option("--output", required=True, type=Path, metavar="DIR", help="gets JSON and Markdown")
    option("--device", default="cpu", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--lookup-dtype", choices=("float32", "bfloat16"),
           help="lookup: the engine's (default float32, on a GPU bfloat16)")  # fmt: skip
    for name, (parts, on_cpu, on_gpu, words) in COUNTS.items():
        words = f"{', '.join(parts)}: {words} (default {on_cpu}, on a GPU {on_gpu})"
        option(flag(name), type=int, metavar="N", help=words)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for name, (_, on_cpu, on_gpu, _) in COUNTS.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device == "cuda" else on_cpu)
    return exit_status("check.real_model", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a part's claim is not true. Raises SettingError."""
    check_least(args, **dict.fromkeys(COUNTS, 1))
    names = list(PARTS) if "all" in args.parts else args.parts
    directory = engine_for(args.checkpoint, dtype="float32", device=args.device)
    setting = Setting(args, ChatText(Tokenizer.load(directory)))
    args.output.mkdir(parents=True, exist_ok=True)
    passed = True
    for name in names:
        print(f"{name}:", flush=True)
        started = time.perf_counter()
        result = PARTS[name](setting)
        passed = passed and result.passed
        write(args, name, result, time.perf_counter() - started)
    return 0 if passed else 1


def write(args: argparse.Namespace, name: str, result: PartResult, seconds: float) -> None:
    """Prints the part's page and writes it beside the part's JSON."""
    counts = {count: getattr(args, count) for count, (parts, *_) in COUNTS.items() if name in parts}
    about = {
        "part": name,
        "date": datetime.date.today().isoformat(),
        "model": args.checkpoint.name,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(seconds),
        **counts,
    }
    lines = [", ".join(f"{key} {value}" for key, value in about.items())]
    for title, rows in result.tables.items():
        lines += [title, table(rows)]
    page = "\n\n".join([*lines, *result.remarks])
    print(page, flush=True)
    (args.output / f"{name}.md").write_text(page + "\n")
    report = about | {"passed": result.passed, "tables": result.tables, "remarks": result.remarks}
    (args.output / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
