"""Log probabilities of bfloat16 runs against those of float32, for the same tokens after the same
text: an engine that finds its KV in each tier, one that reuses nothing, and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pensieve.runtime.engine import Engine
from pensieve.scheduler.types import Sampling

from .conversations import ChatText, RecordedChat
from .play import TIERS, PlayedTurn, PlayLimits, play, sources
from .reference import TransformersReference, distinct

SCORED = Sampling(logprobs=0)
NO_REUSE = "nothing is reused"


def play_scored(
    engine: Engine, text: ChatText, conversations: Sequence[RecordedChat], limits: PlayLimits
) -> dict[str, list[PlayedTurn]]:
    """The same conversations by way, with log probabilities of the replies' tokens."""
    by_way = {tier: play(engine, text, conversations, tier, limits, SCORED) for tier in TIERS}
    by_way[NO_REUSE] = play(engine, text, conversations, "gpu", limits, SCORED, reuse=False)
    return by_way


def token_logprobs(
    reference: TransformersReference, turns: Sequence[PlayedTurn]
) -> list[np.ndarray]:
    """For each turn [reply's tokens] float32: the reference's log probability of each of them."""
    scores: list[np.ndarray] = [np.empty(0)] * len(turns)
    for number, logits in reference.logits(turns):
        reply = torch.tensor(turns[number].reply, device=logits.device)[:, None]
        scores[number] = logits.log_softmax(-1).gather(1, reply)[:, 0].cpu().numpy()
    return scores


def gap_row(way: str, gaps: np.ndarray, counts: dict[str, int]) -> dict[str, Any]:
    """gaps: absolute differences of log probabilities, of all tokens."""
    return {
        "way": way,
        **counts,
        "tokens": len(gaps),
        "mean": float(gaps.mean()),
        "99% below": float(np.quantile(gaps, 0.99)),
        "largest": float(gaps.max()),
    }


def measure_gaps(
    by_way: dict[str, list[PlayedTurn]], exact: TransformersReference, half: TransformersReference
) -> list[dict[str, Any]]:
    """A row for each way of `play_scored`; and one for `half`, with the tokens of the run without
    reuse."""
    shared = distinct(by_way)
    right = token_logprobs(exact, [one.turn for one in shared])
    by_place = {
        place: scores for one, scores in zip(shared, right, strict=True) for place in one.places
    }
    rows = []
    for way, turns in by_way.items():
        own = [np.array([told.logprob for told in turn.logprobs]) for turn in turns]
        exact_ones = [by_place[way, number] for number in range(len(turns))]
        rows.append(gap_row(way, _apart(own, exact_ones), sources(turns)))
    turns = by_way[NO_REUSE]
    theirs = token_logprobs(half, turns)
    exact_ones = [by_place[NO_REUSE, number] for number in range(len(turns))]
    rows.append(gap_row("transformers", _apart(theirs, exact_ones), sources([])))
    return rows


def _apart(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    return np.abs(np.concatenate(ones) - np.concatenate(others))
