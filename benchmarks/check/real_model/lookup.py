"""Prompt lookup with the model's own replies: how many drafts it accepts, and its speed with and
without them.

Each prompt is a recorded conversation up to a reply; the model writes its own. A prompt's KV is
computed before the measurement, so that only generation is timed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pensieve.runtime.engine import Engine

from ...loop import Loop
from .conversations import ChatText, RecordedChat
from .play import PlayLimits, opened, pools

MODES = ("off", "lookup")


def lookup_prompts(
    text: ChatText, conversations: Sequence[RecordedChat], most_tokens: int
) -> list[array[int]]:
    """Of each conversation, the longest prompt that has at most so many tokens; none if there is
    none."""
    prompts = []
    for one in conversations:
        places = [at for at, each in enumerate(one.messages) if each["role"] == "assistant"]
        each = [text.prompt(one.messages[:at]) for at in places]
        fitting = [prompt for prompt in each if len(prompt) <= most_tokens]
        prompts += fitting[-1:]
    return prompts


@dataclass(frozen=True)
class Generated:
    """The replies of one run, its steps and seconds, and the drafts in them."""

    replies: list[list[int]]
    steps: int
    seconds: float
    checks: int
    drafted: int
    accepted: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.replies))


def measure_lookup(
    engine: Engine, kind: str, prompts: Sequence[array[int]], limits: PlayLimits
) -> list[dict[str, Any]]:
    """A row for each prompt alone, and one for as many at once as `limits.rows`."""
    runs = {mode: _generate_all(engine, kind, prompts, limits, mode) for mode in MODES}
    return [
        _row(kind, at_once, off, on)
        for at_once, off, on in zip(_at_once(limits), *runs.values(), strict=True)
    ]


def _at_once(limits: PlayLimits) -> list[int]:
    return sorted({1, limits.rows})


def _row(kind: str, at_once: int, off: Generated, on: Generated) -> dict[str, Any]:
    pairs = zip(off.replies, on.replies, strict=True)
    return {
        "conversations": kind,
        "at once": at_once,
        "reply tokens": on.tokens,
        "checks": on.checks,
        "drafted": on.drafted,
        "accepted": on.accepted,
        "accepted share": _share(on.accepted, on.drafted),
        "tokens/step off": off.tokens / off.steps,
        "tokens/step on": on.tokens / on.steps,
        "tokens/s off": off.tokens / off.seconds,
        "tokens/s on": on.tokens / on.seconds,
        "speed": on.tokens / on.seconds / (off.tokens / off.seconds),
        "equal replies": f"{sum(one == other for one, other in pairs)} of {len(on.replies)}",
    }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _generate_all(
    engine: Engine, kind: str, prompts: Sequence[array[int]], limits: PlayLimits, mode: str
) -> list[Generated]:
    """A run for each number of prompts at once."""
    contexts = [len(prompt) + limits.reply_tokens for prompt in prompts]
    config = replace(pools("gpu", contexts, limits, reuse=True), speculate=mode)
    with opened(engine, config) as loop:
        print(f"  {kind}, {mode}: {len(prompts)} prompts", flush=True)
        for prompt in prompts:
            loop.add(prompt, 1)
        loop.drain()
        runs = []
        for at_once in _at_once(limits):
            print(f"  {kind}, {mode}: replies, {at_once} at once", flush=True)
            runs.append(_generate(loop, engine, prompts, limits.reply_tokens, at_once))
    return runs


def _generate(
    loop: Loop, engine: Engine, prompts: Sequence[array[int]], tokens: int, at_once: int
) -> Generated:
    stats = loop.scheduler.stats()
    first = len(loop.steps)
    replies: list[list[int]] = []
    started = time.perf_counter()
    for start in range(0, len(prompts), at_once):
        answers = [
            loop.add(prompt, tokens, stop_ids=engine.manifest.stop_ids)
            for prompt in prompts[start : start + at_once]
        ]
        loop.drain()
        replies += [answer.tokens for answer in answers]
    seconds = time.perf_counter() - started
    after = loop.scheduler.stats()
    return Generated(
        replies,
        steps=len(loop.steps) - first,
        seconds=seconds,
        checks=after.drafts - stats.drafts,
        drafted=after.drafted - stats.drafted,
        accepted=after.accepted - stats.accepted,
    )
