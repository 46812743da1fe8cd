"""Greedy replies in float32 equal those of transformers, wherever a turn's history comes from.

Conversations are played once for each tier. At each token of each reply, transformers, which
computes the whole context at once, must choose the same token. If it does at all of them, its own
greedy reply is this one. A tie is a token that it does not choose, but whose logit is less than
`TIE` below the chosen one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pensieve.runtime.engine import Engine

from .conversations import ChatText, RecordedChat
from .play import TIERS, PlayedTurn, PlayLimits, play, sources
from .reference import TransformersReference, distinct

TIE = 1e-3
"""Between the logits of two tokens, in float32."""


@dataclass
class Agreement:
    """Replies of one way against the reference's choices.

    close       tokens at which the reference's two best logits are less than `TIE` apart
    ties        of these, tokens that the reference does not choose
    differing   tokens that it does not choose, and that are no ties
    gaps        of ties and differing ones: by how much their logits are below the chosen one's
    """

    turns: int = 0
    equal_turns: int = 0
    tokens: int = 0
    close: int = 0
    ties: int = 0
    differing: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, reply: Sequence[int], logits: Tensor) -> None:
        """logits [n, vocab]: the reference's, of each of the reply's n tokens."""
        best = logits.topk(2, dim=-1).values
        drawn = logits.gather(1, torch.tensor(reply, device=logits.device)[:, None])[:, 0]
        below = (best[:, 0] - drawn).tolist()
        gaps = [gap for gap in below if gap > 0]
        self.turns += 1
        self.tokens += len(reply)
        self.equal_turns += not gaps
        self.close += int((best[:, 0] - best[:, 1] < TIE).sum())
        self.ties += sum(gap < TIE for gap in gaps)
        self.differing += sum(gap >= TIE for gap in gaps)
        self.gaps += gaps

    @property
    def equal(self) -> bool:
        return self.turns > 0 and not self.differing


def compare(
    by_tier: dict[str, list[PlayedTurn]], reference: TransformersReference
) -> dict[str, Agreement]:
    agreements = {tier: Agreement() for tier in by_tier}
    shared = distinct(by_tier)
    for number, logits in reference.logits([one.turn for one in shared]):
        for tier, _ in shared[number].places:
            agreements[tier].add(shared[number].turn.reply, logits)
    return agreements


def measure_exactness(
    engine: Engine,
    text: ChatText,
    conversations: Sequence[RecordedChat],
    limits: PlayLimits,
    reference: TransformersReference,
) -> tuple[list[dict[str, Any]], bool]:
    """A row for each tier; and whether all tokens are equal or ties, and each tier was used."""
    by_tier = {tier: play(engine, text, conversations, tier, limits) for tier in TIERS}
    agreements = compare(by_tier, reference)
    rows: list[dict[str, Any]] = []
    for tier, agreement in agreements.items():
        rows.append(
            {
                "history from": tier,
                **sources(by_tier[tier]),
                "equal replies": f"{agreement.equal_turns} of {agreement.turns}",
                "reply tokens": agreement.tokens,
                "close": agreement.close,
                "ties": agreement.ties,
                "differing": agreement.differing,
                "largest gap": max(agreement.gaps, default=0.0),
            }
        )
    used = all(row[row["history from"]] > 0 for row in rows)
    return rows, used and all(one.equal for one in agreements.values())
