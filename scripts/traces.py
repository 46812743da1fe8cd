"""Workloads for simulation and benchmarks: reads length traces, makes synthetic conversations.

A trace is JSON lines (gzip if its name ends in .gz), one request a line, a conversation's turns in order:

    conversation, turn, arrival_s, think_s, input_tokens, history_tokens, output_tokens [, system_tokens]

`input_tokens` are new in this turn, `history_tokens` what is kept of the conversation before it (null: nothing).
`arrival_s` counts for a conversation's first turn; where it is null, conversations start as a Poisson process. Later
turns need `think_s`, from the end of the reply before. `system_tokens`: how much of the first input is a system prompt,
shared by the conversations with the same number.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..scheduler.sim.simulator import Session, SessionTurn
from ..scheduler.types import SettingError


@dataclass(frozen=True, slots=True)
class ChatStatistics:
    """Means over a data set of chats; lengths in tokens."""

    turns: float
    input_tokens: float
    output_tokens: float


CHATS = {
    "sharegpt": ChatStatistics(turns=5.56, input_tokens=37.77, output_tokens=204.58),
    "ultrachat": ChatStatistics(turns=3.86, input_tokens=51.78, output_tokens=257.81),
}

TURN_COUNTS = ("geometric", "uniform")
"""How the turns of synthetic conversations spread around their mean. Geometric is memoryless, and of ShareGPT's mean
one turn in seven is behind ten or more others; uniform is from 1 to twice the mean, and prompts are a third shorter."""

LEAST = {"turn": 0, "input_tokens": 1, "history_tokens": 0, "output_tokens": 1, "system_tokens": 0}


def synthetic(
    chats: ChatStatistics,
    *,
    conversations: int,
    sessions_per_s: float,
    think_s: float,
    seed: int,
    turn_counts: str = "geometric",
) -> list[Session]:
    """Conversations of these means that start as a Poisson process; the same seed makes the same ones.

    Numbers of turns are one of TURN_COUNTS, lengths exponential (at least 1 token), think times exponential of mean
    `think_s`.
    """
    draw = random.Random(seed)
    starts = poisson(sessions_per_s, draw)
    uniform = turn_counts == "uniform"
    return [
        Session(f"s{index}", next(starts), tuple(_synthetic_turns(chats, think_s, uniform, draw)))
        for index in range(conversations)
    ]


def _synthetic_turns(
    chats: ChatStatistics, think_s: float, uniform: bool, draw: random.Random
) -> Iterator[SessionTurn]:
    history, left = 0, round(draw.uniform(0.5, 2 * chats.turns - 0.5)) if uniform else 0
    while True:
        given, reply = (_length(mean, draw) for mean in (chats.input_tokens, chats.output_tokens))
        yield SessionTurn(history, given, reply, draw.expovariate(1 / think_s) if history else 0.0)
        history += given + reply
        left -= 1
        if left == 0 if uniform else draw.random() < 1 / chats.turns:
            return


def _length(mean: float, draw: random.Random) -> int:
    """A whole number of at least 1, exponential, rounded so that its mean stays `mean`."""
    return 1 + int(draw.expovariate(1 / (mean - 0.5)))


def poisson(per_s: float, draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process, seconds, ascending, without end."""
    now = 0.0
    while True:
        now += draw.expovariate(per_s)
        yield now


def read_trace(path: Path, *, sessions_per_s: float, seed: int) -> list[Session]:
    """The sessions of a trace, in the order of its lines. SettingError names the file and line that cannot be read."""
    starts = poisson(sessions_per_s, random.Random(seed))
    return [_session(name, rows, starts) for name, rows in read_rows(path).items()]


def read_rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The requests of each conversation in their order, checked. SettingError as `read_trace`."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for where, line in read_lines(path):
        row = _row(line, where)
        turns = by_name.setdefault(row["conversation"], [])
        _check_turn(row, turns, where)
        turns.append(row)
    if not by_name:
        raise SettingError("--trace", f"{path} holds no requests")
    return by_name


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, line) for each line that is not empty."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SettingError("--trace", f"{path} cannot be read: {error}") from error


def _row(line: str, where: str) -> dict[str, Any]:
    """The line's object, its fields checked one by one."""
    row = parse_json(line, where)
    if not isinstance(row, dict) or not isinstance(row.get("conversation"), str):
        raise SettingError("--trace", f"{where}: needs an object with a conversation's name")
    row["history_tokens"] = row.get("history_tokens") or 0
    row["system_tokens"] = row.get("system_tokens") or 0
    for name, least in LEAST.items():
        check_whole(row, name, least, where)
    for name in ("arrival_s", "think_s"):
        value = row.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0):
            raise SettingError("--trace", f"{where}: {name} must be seconds or null, not {value!r}")
    return row


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError("--trace", f"{where}: not JSON: {error}") from error


def check_whole(row: dict[str, Any], name: str, least: int, where: str) -> None:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError("--trace", f"{where}: {name} must be a whole number of at least {least}, not {value!r}")


def _check_turn(row: dict[str, Any], before: Sequence[dict[str, Any]], where: str) -> None:
    """The row continues its conversation."""
    name = row["conversation"]
    if row["turn"] != len(before):
        raise SettingError("--trace", f"{where}: turn {row['turn']} of {name} where turn {len(before)} was due")
    log = sum(before[-1][part] for part in ("history_tokens", "input_tokens", "output_tokens")) if before else 0
    if row["history_tokens"] > log:
        raise SettingError("--trace", f"{where}: keeps {row['history_tokens']} tokens of {name}, which has {log}")
    if before and row.get("think_s") is None:
        raise SettingError("--trace", f"{where}: turn {row['turn']} of {name} needs think_s")
    if row["system_tokens"] > (0 if before else row["input_tokens"]):
        raise SettingError("--trace", f"{where}: system_tokens are part of a first turn's input_tokens")


def _session(name: str, rows: Sequence[dict[str, Any]], starts: Iterator[float]) -> Session:
    first = rows[0]
    arrival = first.get("arrival_s")
    start = next(starts) if arrival is None else float(arrival)
    return Session(name, start, session_turns(rows), first["system_tokens"])


def session_turns(rows: Sequence[dict[str, Any]]) -> tuple[SessionTurn, ...]:
    return tuple(
        SessionTurn(row["history_tokens"], row["input_tokens"], row["output_tokens"], float(row.get("think_s") or 0))
        for row in rows
    )
