"""Arrivals of the conversations of a trace that has its own clock."""

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
    send_histories: bool = False,
) -> list[Arrival]:
    """The trace from its start; whole conversations are dropped to lower its rate. SettingError."""
    if send_histories:
        raise SettingError(
            "--send-histories", "the trace has its own clock: no conversation is open at its start"
        )
    draw = random.Random(seed)
    native = clock_rate(dialogues)
    assert native is not None
    share = rate / native
    if share > 1 + 1e-9:
        raise SettingError("--rate", f"at most {native:.4g}, which is all that the trace has")
    zero = min(dialogue.start_s or 0.0 for dialogue in dialogues)
    starts = [((dialogue.start_s or 0.0) - zero, dialogue) for dialogue in dialogues]
    last = max(start for start, _ in starts)
    if last < seconds:
        raise SettingError(
            "--measure-s", f"the run takes {seconds:g} s with its warm-up, the trace {last:g}"
        )
    kept = [
        Arrival(start, dialogue)
        for start, dialogue in starts
        if draw.random() < share and start < seconds
    ]
    return sorted(kept, key=lambda arrival: arrival.at)
