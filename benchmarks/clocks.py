"""Arrivals of the conversations of a trace that has its own clock.

Time is never stretched. A run plays one part of the trace, from 0 on, and drops whole conversations
to lower its rate. A rate that one part does not have is played with several parts at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.traces import Dialogue


def clock_rate(dialogues: Sequence[Dialogue]) -> float | None:
    """Conversations per second by the trace's own clock; None if it has none."""
    starts = [dialogue.start_s for dialogue in dialogues if dialogue.start_s is not None]
    if not starts:
        return None
    lasts = max(starts) - min(starts)
    return len(starts) / lasts if lasts else len(starts) / 1.0


def replay(
    dialogues: Sequence[Dialogue],
    *,
    rate: float,
    seconds: float,
    seed: int,
) -> list[Arrival]:
    """`rate * seconds` conversations of the trace, of parts of `seconds` each. The seed chooses the
    parts and the conversations. At rates up to the trace's own, fewer may come: a long run has one
    part, and it may be quiet. SettingError."""
    starts = [dialogue.start_s for dialogue in dialogues if dialogue.start_s is not None]
    zero = min(starts)
    num_parts = int((max(starts) - zero) / seconds)
    if num_parts == 0:
        raise SettingError(
            "--measure-s",
            f"the run takes {seconds:g} s with its warm-up, the trace {max(starts) - zero:g}",
        )
    parts: list[list[Arrival]] = [[] for _ in range(num_parts)]
    for start, dialogue in zip(starts, dialogues, strict=True):
        part, at = divmod(start - zero, seconds)
        if part < num_parts:
            parts[int(part)].append(Arrival(at, dialogue))
    draw = random.Random(seed)
    draw.shuffle(parts)
    needed = round(rate * seconds)
    played: list[Arrival] = []
    for arrivals in parts:
        if len(played) >= needed:
            break
        played += arrivals
    own = clock_rate(dialogues)
    assert own is not None
    if len(played) < needed and rate > own:
        raise SettingError(
            "--rate",
            f"at most {max(own, len(played) / seconds):.4g}, which is all that the trace has",
        )
    kept = draw.sample(played, min(needed, len(played)))
    return sorted(kept, key=lambda arrival: arrival.at)
