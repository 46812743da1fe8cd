"""What KV and weights in fewer bits and overflowing contexts cost, against the same model in
float32 with the whole context. The measure is `check.quality`'s, on the text of recorded replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pensieve.builder.engine_cache import engine_for
from pensieve.builder.model import Decoder
from pensieve.builder.quantised import projections
from pensieve.plugins.kv_forms.forms import FP8, PACKED
from pensieve.runtime.engine import FP8_CAPABILITY, Engine, open_engine
from pensieve.scheduler.context_window import KEEP, RECOMPUTE, ContextWindow

from ..quality import (
    CHUNK,
    LEAST_CHUNKS,
    RESTART,
    Context,
    Quality,
    QualityTurn,
    QualityWay,
    measure,
    truncated_logits,
)
from ..reuse import whole_of
from .conversations import ChatText, RecordedChat, ReplyTokens
from .reference import TransformersReference

INT4_GROUPS = (128, 64, 32)
"""Inputs that share a scale: the largest number that divides every projection's inputs is used."""

WHOLE = "whole context"
WITH_FIRST = "keep, and the first token"
OVERFLOW_WAYS = {"keep": KEEP, "recompute": RECOMPUTE, "restart positions": RESTART}


# Histories and weights in fewer bits.


def quality_turns(
    text: ChatText, conversations: Sequence[RecordedChat], context: int, most: int
) -> list[QualityTurn]:
    """Of each conversation, the last turn whose context fits, with at most `most` tokens of its
    reply, if it has a history of at least two chunks."""
    turns = []
    for one in conversations:
        fitting = None
        for place, message in enumerate(one.messages):
            if message["role"] != "assistant" or place < 2:
                continue
            history = text.until(one.messages[: place - 1])
            prompt = text.prompt(one.messages[:place])
            whole = text.until(one.messages[: place + 1])
            chunks = len(history) // CHUNK
            reply = whole[len(prompt) :][:most]
            if len(prompt) + len(reply) > context:
                break
            if chunks >= LEAST_CHUNKS and reply and whole[: len(prompt)] == prompt:
                fitting = QualityTurn(chunks * CHUNK, list(prompt), list(reply))
        if fitting is not None:
            turns.append(fitting)
    return turns


def round_to_int4(weight: Tensor, group: int) -> Tensor:
    """The weight [outputs, inputs], each group of inputs rounded to the nearest of 16 numbers that
    divide its range evenly."""
    grouped = weight.float().unflatten(1, (-1, group))
    least = grouped.amin(-1, keepdim=True)
    step = (grouped.amax(-1, keepdim=True) - least) / 15
    codes = ((grouped - least) / step.clamp(min=1e-12)).round()
    return (codes * step + least).flatten(1).to(weight.dtype)


def int4_engine(directory: Path, exact: Engine) -> tuple[Engine, int]:
    """An engine like `exact` whose projections are rounded to int4 and widened again, and the size
    of the groups. It has the loss of int4, and not its speed or memory."""
    weights = dict(whole_of(directory, exact.manifest))
    names = [f"{name}.weight" for name in sorted(projections(exact.manifest.decoder))]
    inputs = {weights[name].shape[1] for name in names}
    group = next(size for size in INT4_GROUPS if all(width % size == 0 for width in inputs))
    for name in names:
        weights[name] = round_to_int4(weights[name], group)
    on_device = {name: tensor.to(exact.manifest.device) for name, tensor in weights.items()}
    return Engine(exact.manifest, Decoder.from_weights(exact.manifest.decoder, on_device)), group


@dataclass(frozen=True)
class Ways:
    """The ways to compute a turn, the exact one first, and why others are left out."""

    ways: list[QualityWay]
    left_out: list[str]


def fewer_bits(checkpoint: Path, device: str) -> Ways:
    directory = engine_for(checkpoint, dtype="float32", device=device)
    exact = open_engine(directory, device)
    half = open_engine(engine_for(checkpoint, dtype="bfloat16", device=device), device)
    rounded = engine_for(checkpoint, dtype="bfloat16", quantization="fp8", device=device)
    ways = [
        QualityWay("float32", exact),
        QualityWay("fp8 lower tiers", exact, FP8),
    ]
    left_out = []
    if device == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        left_out.append("fp8 on every tier: this GPU does not convert e4m3")
    else:
        everywhere = open_engine(directory, device, kv_cache_dtype="fp8")
        ways.append(QualityWay("fp8 on every tier", everywhere))
    int4, group = int4_engine(directory, exact)
    ways += [
        QualityWay("bfloat16", half),
        QualityWay("bfloat16, packed lower tiers", half, PACKED),
        QualityWay("bfloat16, FP8 weights", open_engine(rounded, device)),
        QualityWay(f"int4 weights, groups of {group}", int4),
    ]
    if device == "cpu":
        left_out.append("FP8 activations beside FP8 weights: only a GPU multiplies in FP8")
    return Ways(ways, left_out)


def measure_fewer_bits(
    checkpoint: Path, device: str, turns: list[QualityTurn], most: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows by way, and what is left out. Replies are greedy, at most `most` tokens."""
    chosen = fewer_bits(checkpoint, device)
    results = measure("", chosen.ways, counted(turns), most, replies_only=True)
    return quality_rows(results), chosen.left_out


def counted(turns: Sequence[QualityTurn]) -> Iterator[QualityTurn]:
    """Prints the number of each turn before it is measured."""
    for number, turn in enumerate(turns, start=1):
        print(f"  turn {number} of {len(turns)}: {len(turn.prompt)} tokens", flush=True)
        yield turn


def quality_rows(results: Sequence[Quality]) -> list[dict[str, Any]]:
    """The first result is the exact one."""
    rows: list[dict[str, Any]] = []
    for result in results:
        change = result.perplexity / results[0].perplexity - 1
        row = {
            "way": result.way,
            "tokens": result.tokens,
            "perplexity": f"{result.perplexity:.4f}",
            "change": f"{change:+.2%}",
            "KL divergence, nats": f"{abs(result.divergence) / result.tokens:.5f}",
            "equal greedy tokens": f"{result.agreed / result.tokens:.2%}",
        }
        if result.reply_tokens:
            row["equal replies"] = f"{result.equal_replies} of {result.turns}"
        rows.append(row)
    return rows


# Overflow.


def overflow_rows(
    text: ChatText, conversations: Sequence[RecordedChat], tokens: int, most: int
) -> list[ReplyTokens]:
    """The first `tokens` tokens of at most `most` conversations that have so many."""
    rows: list[ReplyTokens] = []
    for one in conversations:
        whole = text.replies(one.messages)
        if len(rows) < most and len(whole.tokens) >= tokens:
            rows.append(ReplyTokens(whole.tokens[:tokens], whole.is_reply[:tokens]))
    return rows


def measure_overflow(
    engine: Engine,
    rows: Sequence[ReplyTokens],
    length: int,
    step: int,
    reference: TransformersReference,
) -> list[Quality]:
    """Compares each way with the whole context, at the recorded replies' tokens that do not see
    all of it under a limit of `length` tokens.

    `WITH_FIRST` is no way of a server: transformers computes what kept KV would be worth if the
    context's first token stayed visible.
    """
    names = [WHOLE, *OVERFLOW_WAYS, WITH_FIRST]
    if engine.manifest.decoder.rotary is None:
        names.remove("keep")
    results = {name: Quality("", name) for name in names}
    for number, row in enumerate(rows, start=1):
        print(f"  overflow: conversation {number} of {len(rows)}", flush=True)
        context = Context(engine, len(row.tokens))
        exact = context.compute(row.tokens[:-1], 0, scored=length)
        for name, result in results.items():
            if name == WHOLE:
                pieces = [(length, exact)]
            elif name == WITH_FIRST:
                windows = ContextWindow(length, step, KEEP)
                pieces = [(length, reference.windowed_logits(row.tokens[:-1], windows, 1))]
            else:
                windows = ContextWindow(length, step, OVERFLOW_WAYS[name])
                pieces = list(truncated_logits(context, row.tokens, windows))
            for start, logits in pieces:
                end = start + len(logits)
                scored = torch.tensor(row.is_reply[start + 1 : end + 1])
                targets = torch.tensor(row.tokens[start + 1 : end + 1])[scored]
                if len(targets):
                    own = logits.cpu()[scored]
                    result.compare(own, exact[start - length : end - length].cpu()[scored], targets)
    return list(results.values())
