"""transformers' own forward pass over whole contexts: nothing of a turn is kept for the next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pensieve.scheduler.context_window import ContextWindow

from .play import PlayedTurn

BATCH_TOKENS = {"cpu": 1, "cuda": 16_384}
"""Tokens that are computed at once, padding included; at least one context."""

SHOWN_TURNS = 20  # between two lines of progress


class TurnLogits(NamedTuple):
    """`logits` [n, vocab] float32: of each of the n tokens of the turn's reply."""

    number: int
    logits: Tensor


class TransformersReference:
    """A checkpoint as transformers reads it."""

    def __init__(self, checkpoint: Path, device: str, dtype: torch.dtype = torch.float32):
        # imported here because it takes seconds
        from transformers import AutoModelForCausalLM

        where = checkpoint
        file = {}
        if checkpoint.is_file():  # GGUF
            where = checkpoint.parent
            file = {"gguf_file": checkpoint.name}
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **file)
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def logits(self, turns: Sequence[PlayedTurn]) -> Iterator[TurnLogits]:
        """Yields the logits of every turn's reply, in batches of turns of similar length."""
        started = time.perf_counter()
        done = 0
        for batch in batches(turns, BATCH_TOKENS[self._device]):
            contexts = [[*turns[number].prompt, *turns[number].reply] for number in batch]
            width = max(map(len, contexts))
            # Tokens see no later ones, so padding behind a context changes nothing in it.
            padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in contexts])
            ends = [len(turns[number].prompt) - 1 for number in batch]
            counts = [len(turns[number].reply) for number in batch]
            spans = zip(ends, counts, strict=True)
            places = sorted({place for end, count in spans for place in range(end, end + count)})
            kept = torch.tensor(places, device=self._device)
            padded = padded.to(self._device)
            logits = self._model(padded, use_cache=False, logits_to_keep=kept).logits
            for row, number in enumerate(batch):
                first = places.index(ends[row])
                yield TurnLogits(number, logits[row, first : first + counts[row]].float())
            done += len(batch)
            if done % SHOWN_TURNS < len(batch) or done == len(turns):
                seconds = time.perf_counter() - started
                print(f"  transformers: {done} of {len(turns)} turns, {seconds:.0f} s", flush=True)

    @torch.inference_mode()
    def windowed_logits(self, tokens: Sequence[int], windows: ContextWindow, always: int) -> Tensor:
        """Logits [n, vocab] float32 of the n positions behind the window's length. A position sees
        its window, and the first `always` tokens beside it."""
        position = torch.arange(len(tokens))
        start = torch.tensor([windows.start(place) for place in range(len(tokens))])[:, None]
        hidden = (position > position[:, None]) | ((position < start) & (position >= always))
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        outcome = self._model(
            torch.tensor([tokens], device=self._device),
            attention_mask=mask.to(self._device)[None, None],
            use_cache=False,
            logits_to_keep=position[windows.length :].to(self._device),
        )
        return outcome.logits[0].float()


class SharedTurn(NamedTuple):
    """A prompt with a reply, and the places of all turns that have them, each (way, number)."""

    turn: PlayedTurn
    places: list[tuple[str, int]]


def distinct(by_way: Mapping[str, Sequence[PlayedTurn]]) -> list[SharedTurn]:
    """The prompts with their replies, each once: most ways give equal ones."""
    shared: dict[tuple[bytes, tuple[int, ...]], SharedTurn] = {}
    for way, turns in by_way.items():
        for number, turn in enumerate(turns):
            key = (turn.prompt.tobytes(), turn.reply)
            shared.setdefault(key, SharedTurn(turn, [])).places.append((way, number))
    return list(shared.values())


def batches(turns: Sequence[PlayedTurn], most_tokens: int) -> Iterator[list[int]]:
    """Numbers of turns: the longest contexts first, then batches of at most `most_tokens` tokens
    with padding, or of one turn."""

    def length(number: int) -> int:
        return len(turns[number].prompt) + len(turns[number].reply)

    batch: list[int] = []
    for number in sorted(range(len(turns)), key=length, reverse=True):
        if batch and length(batch[0]) * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
