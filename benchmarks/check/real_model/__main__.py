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
from pensieve.builder.manifest import Manifest
from pensieve.runtime.engine import Engine, open_engine
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
from .play import CHUNK, PlayLimits
from .reference import TransformersReference

PLAYED = ("exactness", "gaps")
COUNTS = {
    "conversations": ((*PLAYED, "losses"), 10, 200, "three short chats for each service agent's"),
    "turns": (PLAYED, 3, 10, "most turns of a conversation"),
    "reply_tokens": ((*PLAYED, "losses"), 16, 48, "most tokens of the model's replies"),
    "rows": ((*PLAYED, "lookup"), 8, 64, "most requests at once"),
    "context": ((*PLAYED, "losses", "lookup"), 2048, 8000, "most tokens of a context"),
    "scored_turns": (("losses",), 10, 40, "last turns of conversations"),
    "scored_tokens": (("losses",), 64, 256, "most tokens of a recorded reply"),
    "overflow_context": (("overflow",), 1024, 1024, "tokens that the model may see"),
    "overflow_steps": (("overflow",), 2, 4, "truncations in a text, each of half that context"),
    "overflow_texts": (("overflow",), 2, 16, "texts of each kind"),
    "lookup_conversations": (("lookup",), 3, 16, "conversations of each kind"),
    "lookup_tokens": (("lookup",), 48, 256, "most tokens of a reply"),
}
"""Options: the parts that read them, the defaults for a CPU and for a GPU, and in words."""


MOST_CONVERSATIONS = 200  # of a kind, among which long ones are looked for


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

    def engine(self, dtype: str) -> Engine:
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
        f"{'PASS' if passed else 'FAIL'}: {len(conversations)} conversations. Columns gpu to new "
        "are prompt tokens by where their KV came from. Close: the two best logits are less than "
        f"{TIE} apart. Ties: of these, transformers chooses the other token. Gap: between the two."
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
    tokens = overflow_tokens(args)
    texts = []
    for kind in (SERVICE, AGENTS):
        conversations = read_conversations(args.data, kind, MOST_CONVERSATIONS)
        texts += overflow_rows(setting.text, conversations, tokens, args.overflow_texts)
    if not texts:
        raise SettingError("--overflow-context", f"no conversation has {tokens} tokens; take less")
    reference = TransformersReference(args.checkpoint, args.device)
    engine = setting.engine("float32")
    results = measure_overflow(engine, texts, length, overflow_step(args), reference)
    title = f"Contexts that overflow {length} tokens"
    remark = f"{len(texts)} texts of {tokens - 1} tokens."
    return PartResult({title: quality_rows(results)}, [remark])


def lookup(setting: Setting) -> PartResult:
    args = setting.args
    dtype = "bfloat16" if args.device == "cuda" else "float32"
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
    check_contexts(args, Manifest.read(directory).max_model_len)
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


def check_contexts(args: argparse.Namespace, most: int) -> None:
    """SettingError if a context is longer than the model's, or too short to be truncated."""
    if args.context > most:
        raise SettingError("--context", f"must be at most the model's, {most}, not {args.context}")
    length = args.overflow_context
    if length < 2 * CHUNK:
        raise SettingError("--overflow-context", f"must be at least {2 * CHUNK}, not {length}")
    if overflow_tokens(args) > most:
        raise SettingError(
            "--overflow-steps",
            f"texts would have {overflow_tokens(args)} tokens, and the model sees {most}",
        )


def overflow_step(args: argparse.Namespace) -> int:
    """Tokens of a truncation: half of the context, in whole chunks."""
    return args.overflow_context // 2 // CHUNK * CHUNK


def overflow_tokens(args: argparse.Namespace) -> int:
    """Tokens of each text, and the one that is predicted last."""
    return args.overflow_context + args.overflow_steps * overflow_step(args) + 1


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
