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

from .conversations import ChatText, Conversation
from .play import TIERS, PlayedTurn, PlayLimits, play, sources
from .reference import Reference

SCORED = Sampling(logprobs=0)
NO_REUSE = "nothing is reused"


def play_scored(
    engine: Engine, text: ChatText, conversations: Sequence[Conversation], limits: PlayLimits
) -> dict[str, list[PlayedTurn]]:
    """The same conversations by way, with log probabilities of the replies' tokens."""
    by_way = {tier: play(engine, text, conversations, tier, limits, SCORED) for tier in TIERS}
    by_way[NO_REUSE] = play(engine, text, conversations, "gpu", limits, SCORED, reuse=False)
    return by_way


def token_logprobs(reference: Reference, turns: Sequence[PlayedTurn]) -> list[np.ndarray]:
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
    by_way: dict[str, list[PlayedTurn]], exact: Reference, half: Reference
) -> list[dict[str, Any]]:
    """A row for each way of `play_scored`; and one for `half`, with the tokens of the run without
    reuse."""
    rows = []
    for way, turns in by_way.items():
        own = [np.array([told.logprob for told in turn.logprobs]) for turn in turns]
        right = token_logprobs(exact, turns)
        rows.append(gap_row(way, _apart(own, right), sources(turns)))
        if way == NO_REUSE:
            theirs = token_logprobs(half, turns)
            nothing = dict.fromkeys(sources(turns), 0)
            rows.append(gap_row("transformers", _apart(theirs, right), nothing))
    return rows


def _apart(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    return np.abs(np.concatenate(ones) - np.concatenate(others))
