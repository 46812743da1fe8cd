"""What `check_reuse` compares: answers, held against float32 and against the cold one, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..scheduler.types import TokenLogprobs, Usage

SOURCES = ("gpu", "host", "recomputed", "new")
FLOAT32_TOLERANCE = 1e-4


@dataclass(slots=True)
class Answer:
    """tokens, logprobs: of the reply, as many as have come; usage with the first; done with the last."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    usage: Usage | None = None
    done: bool = False


def differences(one: TokenLogprobs, token: int, other: TokenLogprobs, other_token: int) -> list[float]:
    """Of the log probabilities of every token that both tell."""
    here, there = _by_id(one, token), _by_id(other, other_token)
    return [abs(here[each] - there[each]) for each in here if each in there]


def _by_id(told: TokenLogprobs, token: int) -> dict[int, float]:
    return dict(zip(told.top_ids, told.top_logprobs, strict=True)) | {token: told.logprob}


@dataclass(slots=True)
class Way:
    """Of all its answers: tokens by source, differences of log probabilities, replies that leave the cold one's path.

    `gaps`: between the two tokens where a reply leaves it, as the runs see them; infinite if one does not see both.
    """

    count: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    to_float32: list[float] = field(default_factory=list)
    to_cold: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, answer: Answer, exact: Answer, cold: Answer) -> None:
        self.count += 1
        for source in SOURCES:
            self.tokens[source] += getattr(answer.usage, source)
        self.to_float32 += differences(answer.logprobs[0], answer.tokens[0], exact.logprobs[0], exact.tokens[0])
        pairs = zip(answer.tokens, answer.logprobs, cold.tokens, cold.logprobs, strict=False)
        for token, told, cold_token, cold_told in pairs:
            self.to_cold += differences(told, token, cold_told, cold_token)
            if token != cold_token:
                self.gaps.append(max(_gap(told, token, cold_token), _gap(cold_told, cold_token, token)))
                return  # from here on they answer different texts

    def summary(self) -> dict[str, float | int | dict[str, int]]:
        return {
            "count": self.count,
            "tokens": self.tokens,
            "to_float32_max": max(self.to_float32),
            "to_float32_mean": float(np.mean(self.to_float32)),
            "to_cold_max": max(self.to_cold),
            "to_cold_mean": float(np.mean(self.to_cold)),
            "differing": len(self.gaps),
            "gap_max": max(self.gaps, default=0.0),
        }


def _gap(told: TokenLogprobs, drawn: int, other: int) -> float:
    seen = _by_id(told, drawn)
    return seen[drawn] - seen[other] if other in seen else float("inf")


def judge(ways: dict[str, Way], float32: bool) -> tuple[float, list[str]]:
    """The tolerance, and the ways that exceed it."""
    tolerance = FLOAT32_TOLERANCE if float32 else 2 * float(np.max(ways["cold"].to_float32))
    failed = []
    for name, way in ways.items():
        errors = [*way.to_float32, *way.gaps, *(way.to_cold if float32 else [])]
        if not np.max(errors) <= tolerance:  # nor does it hold for what is no number
            failed.append(name)
    return tolerance, failed


def table(ways: dict[str, Way]) -> Iterator[str]:
    yield (
        f"{'way':12}{'count':>6}"
        + "".join(f"{source:>12}" for source in SOURCES)
        + (f"{'to float32':>12}{'mean':>10}{'to cold':>12}{'mean':>10}{'differing':>10}")
    )
    for name, way in ways.items():
        told = way.summary()
        yield (
            f"{name:12}{way.count:6}"
            + "".join(f"{way.tokens[source]:12}" for source in SOURCES)
            + (
                f"{told['to_float32_max']:12.2e}{told['to_float32_mean']:10.1e}"
                f"{told['to_cold_max']:12.2e}{told['to_cold_mean']:10.1e}{told['differing']:10}"
            )
        )
