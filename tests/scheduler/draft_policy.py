"""What tests put in the place of the decision whether drafts pay."""

from __future__ import annotations

import random

from pensieve.scheduler import draft_timing
from pensieve.scheduler.planning.drafting import Drafting, Rates


def always_draft(monkeypatch):
    """Every draft for which a step has room pays."""
    monkeypatch.setattr(draft_timing.DraftTiming, "turned_round", lambda *_: None)
    monkeypatch.setattr(draft_timing, "FIRST_TURNAROUND", -1e9)
    monkeypatch.setattr(Drafting, "_pays", lambda self, rates, expected, drafts, *_: drafts > 0)
    monkeypatch.setattr(Rates, "least", property(lambda _: 0.0))


def decide_by_chance(monkeypatch, seed, share=0.6):
    """Whether drafts pay, and how many, is decided by chance: no decision may harm a reply."""
    dice = random.Random(seed)
    always_draft(monkeypatch)
    monkeypatch.setattr(Drafting, "_pays", lambda *_: dice.random() < share)
    monkeypatch.setattr(Rates, "least", property(lambda _: dice.choice((0.0, 0.1, 0.5))))
