"""Prompt lookup with the model's own replies: how many drafts it accepts, and its speed with and
without them.

Each prompt is a recorded conversation up to a reply; the model writes its own. A prompt's KV is
computed before the measurement, so that only generation is timed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pensieve.runtime.engine import Engine

from ...loop import Loop
from .conversations import ChatText, Conversation
from .play import PlayLimits, opened, pools


def lookup_prompts(
    text: ChatText, conversations: Sequence[Conversation], most_tokens: int
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


def measure_lookup(
    engine: Engine, kind: str, prompts: Sequence[array[int]], limits: PlayLimits
) -> list[dict[str, Any]]:
    """Two rows: each prompt alone, and as many at once as `limits.rows`."""
    rows = []
    for at_once in (1, limits.rows):
        by_mode = {}
        for mode in ("off", "lookup"):
            print(f"  {kind}: {at_once} at once, {mode}", flush=True)
            by_mode[mode] = _generate(engine, prompts, limits, mode, at_once)
        off, lookup = by_mode["off"], by_mode["lookup"]
        replies = zip(off["replies"], lookup["replies"], strict=True)
        rows.append(
            {
                "conversations": kind,
                "at once": at_once,
                "reply tokens": off["tokens"],
                "checks": lookup["drafts"],
                "drafted": lookup["drafted"],
                "accepted": lookup["accepted"],
                "accepted share": _share(lookup["accepted"], lookup["drafted"]),
                "tokens/step off": off["tokens"] / off["steps"],
                "tokens/step on": lookup["tokens"] / lookup["steps"],
                "tokens/s off": off["tokens"] / off["seconds"],
                "tokens/s on": lookup["tokens"] / lookup["seconds"],
                "speed": (lookup["tokens"] / lookup["seconds"]) / (off["tokens"] / off["seconds"]),
                "equal replies": f"{sum(a == b for a, b in replies)} of {len(prompts)}",
            }
        )
    return rows


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _generate(
    engine: Engine, prompts: Sequence[array[int]], limits: PlayLimits, mode: str, at_once: int
) -> dict[str, Any]:
    contexts = [len(prompt) + limits.reply_tokens for prompt in prompts]
    config = replace(pools("gpu", contexts, limits, reuse=True), speculate=mode)
    with opened(engine, config) as loop:
        for prompt in prompts:
            loop.add(prompt, 1)
        loop.drain()
        before = loop.scheduler.stats()
        steps = 0
        seconds = 0.0
        replies: list[list[int]] = []
        for first in range(0, len(prompts), at_once):
            spent, taken, batch = _timed(loop, engine, prompts[first : first + at_once], limits)
            seconds += spent
            steps += taken
            replies += batch
        after = loop.scheduler.stats()
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("drafts", "drafted", "accepted")
    }
    tokens = sum(map(len, replies))
    return {"seconds": seconds, "steps": steps, "replies": replies, "tokens": tokens, **counts}


def _timed(
    loop: Loop, engine: Engine, prompts: Sequence[array[int]], limits: PlayLimits
) -> tuple[float, int, list[list[int]]]:
    """Seconds, steps, and the replies."""
    first = len(loop.steps)
    started = time.perf_counter()
    answers = [
        loop.add(prompt, limits.reply_tokens, stop_ids=engine.manifest.stop_ids)
        for prompt in prompts
    ]
    loop.run_until(lambda: all(answer.done for answer in answers))
    seconds = time.perf_counter() - started
    return seconds, len(loop.steps) - first, [answer.tokens for answer in answers]
